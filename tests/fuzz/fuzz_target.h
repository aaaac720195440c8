// Helpers of the fuzz targets. A target is the function that libFuzzer calls. Linked with libFuzzer
// it is a fuzzer; linked with run_corpus.cc, a test that parses the files of its corpus.
#ifndef TANDEM_TESTS_FUZZ_FUZZ_TARGET_H_
#define TANDEM_TESTS_FUZZ_FUZZ_TARGET_H_

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include "absl/status/status.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace tandem::fuzz {

// Ends the process if a law does not hold; libFuzzer and CTest both report that as a failure.
inline void Require(bool holds, const char* law) {
  if (holds) return;
  std::fprintf(stderr, "broken: %s\n", law);
  std::abort();
}

// Ends the process unless a parser's status is one that a bad file may cause.
inline void RequireRefusal(const absl::Status& status) {
  Require(!status.message().empty(), "a refusal says why");
  Require(absl::IsInvalidArgument(status) || absl::IsUnimplemented(status) ||
              absl::IsDataLoss(status) || absl::IsOutOfRange(status),
          "a refusal has a code for bad input");
}

}  // namespace tandem::fuzz

#endif  // TANDEM_TESTS_FUZZ_FUZZ_TARGET_H_
