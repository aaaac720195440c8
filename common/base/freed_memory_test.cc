#include "common/base/freed_memory.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>
#include <memory>
#include <vector>

namespace tandem {
namespace {

int64_t ResidentBytes() {
  int64_t pages = 0;
  int64_t resident = 0;
  std::ifstream("/proc/self/statm") >> pages >> resident;
  return resident * sysconf(_SC_PAGESIZE);
}

TEST(FreedMemory, GoesBackAlthoughSomethingBehindItLives) {
  constexpr int kBuffers = 20'000;
  constexpr int kBufferBytes = 8 << 10;
  const int64_t before = ResidentBytes();
  std::vector<std::unique_ptr<char[]>> buffers;
  for (int i = 0; i < kBuffers; ++i) {
    buffers.push_back(std::make_unique<char[]>(kBufferBytes));  // written: it is zeroed
  }
  const std::unique_ptr<char[]> last = std::move(buffers.back());  // keeps the heap's end in use
  buffers.clear();
  ASSERT_GT(ResidentBytes(), before + kMaxFreedBytes) << "glibc keeps it";
  EXPECT_TRUE(ReturnFreedMemory());
  EXPECT_LT(ResidentBytes(), before + (16 << 20));
}

TEST(FreedMemory, LittleIsKept) { EXPECT_FALSE(ReturnFreedMemory()); }

}  // namespace
}  // namespace tandem
