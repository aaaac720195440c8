// Helpers of the fuzz targets. A target is a function of libFuzzer's name and type; linked with
// libFuzzer it is a fuzzer, linked with run_corpus.cc a test that parses the files of its corpus.
#ifndef TANDEM_TESTS_FUZZ_FUZZ_TARGET_H_
#define TANDEM_TESTS_FUZZ_FUZZ_TARGET_H_

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include "absl/status/status.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace tandem::fuzz {

// A law that does not hold ends the process, which libFuzzer and CTest both take for a failure.
inline void Require(bool holds, const char* law) {
  if (holds) return;
  std::fprintf(stderr, "broken: %s\n", law);
  std::abort();
}

// Whether a parser's status is one that a file may cause: invalid or not supported.
inline void RequireRefusal(const absl::Status& status) {
  Require(!status.message().empty(), "a refusal says why");
  Require(absl::IsInvalidArgument(status) || absl::IsUnimplemented(status) ||
              absl::IsDataLoss(status) || absl::IsOutOfRange(status),
          "a refusal has a code for bad input");
}

}  // namespace tandem::fuzz

#endif  // TANDEM_TESTS_FUZZ_FUZZ_TARGET_H_
