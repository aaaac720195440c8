// Gives every repetition of the tests (--gtest_repeat) a seed of its own.
#include <gtest/gtest.h>

#include "tests/gpu/emulated/cuda_runtime.h"

namespace {

class Seeds : public testing::EmptyTestEventListener {
  void OnTestIterationStart(const testing::UnitTest& /*tests*/, int iteration) override {
    tandem::emulated::SetSeed(static_cast<uint64_t>(iteration));
  }
};

const bool added = [] {
  testing::UnitTest::GetInstance()->listeners().Append(new Seeds);
  return true;
}();

}  // namespace
