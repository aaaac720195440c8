#include "common/tensor/aten/catch_torch_errors.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <limits>
#include <new>
#include <string>

#include "common/base/errors/memory_error.h"

namespace tandem {
namespace {

// Returns the status of a body that throws `E` with this text.
template <typename E>
absl::Status Thrown(const std::string& text) {
  return CatchTorchErrors("forward pass", [&]() -> absl::Status { throw E({}, text); });
}

void ExpectOutOfMemory(const absl::Status& status, const std::string& message) {
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  EXPECT_EQ(status.message(), message);
}

TEST(CatchTorchErrorsTest, AGpuWithoutMemoryIsToldInOurWords) {
  ExpectOutOfMemory(
      Thrown<c10::OutOfMemoryError>(
          "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.19 GiB "
          "of which 1.50 GiB is free. Including non-PyTorch memory, this process has 77.60 GiB "
          "memory in use. If reserved but unallocated memory is large try setting "
          "PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation."),
      "forward pass: the GPU's memory (79.19 GiB, of which 1.50 GiB were free when 2.00 GiB more "
      "were needed) is used up");
  ExpectOutOfMemory(Thrown<c10::OutOfMemoryError>("another text"),
                    "forward pass: the GPU's memory is used up");
  for (const std::string text :
       {"CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"}) {
    ExpectOutOfMemory(Thrown<c10::Error>(text), "forward pass: the GPU's memory is used up");
  }
}

TEST(CatchTorchErrorsTest, AHostWithoutMemoryIsToldInOurWords) {
  ExpectOutOfMemory(CatchTorchErrors("forward pass",
                                     [&] {
                                       at::empty({std::numeric_limits<int64_t>::max() / 8});
                                       return absl::OkStatus();
                                     }),
                    "forward pass: the host's memory is used up");
  ExpectOutOfMemory(
      CatchTorchErrors("forward pass", []() -> absl::Status { throw std::bad_alloc(); }),
      "forward pass: the host's memory is used up");
}

TEST(CatchTorchErrorsTest, OtherErrorsKeepTheirText) {
  EXPECT_EQ(Thrown<c10::Error>("expected 2 dimensions"),
            absl::InternalError("forward pass: expected 2 dimensions"));
  EXPECT_EQ(Thrown<c10::NotImplementedError>("complex"),
            absl::UnimplementedError("forward pass: complex"));
}

TEST(CatchTorchErrorsTest, OnlyErrorsOfMemoryNameTheSettings) {
  const std::string named = "step: the host's memory is used up; remedies: a, b";
  const absl::Status once =
      NameMemorySettings(OutOfMemoryError("step", "the host's memory"), "a, b");
  ExpectOutOfMemory(once, named);
  ExpectOutOfMemory(NameMemorySettings(once, "c"), named);
  const absl::Status other = absl::ResourceExhaustedError("full");
  EXPECT_EQ(NameMemorySettings(other, "a, b"), other);
  EXPECT_TRUE(NameMemorySettings(absl::OkStatus(), "a, b").ok());
}

}  // namespace
}  // namespace tandem
