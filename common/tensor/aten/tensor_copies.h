// Copies of tensors in the host's memory, for work beside the thread that changes them.
#ifndef TANDEM_COMMON_TENSOR_ATEN_TENSOR_COPIES_H_
#define TANDEM_COMMON_TENSOR_ATEN_TENSOR_COPIES_H_

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/tensor/aten/host_copies.h"

namespace tandem {

// Copies sets of tensors, one set after the other, into the same memory: fresh pages cost several
// times as much as the copy into them. A set must not be used any more when the next one begins.
//
//   copies.Begin();
//   for (…) TANDEM_ASSIGN_OR_RETURN(copy, copies.Add(tensor));
//   TANDEM_RETURN_IF_ERROR(copies.Finish());
//
// Not thread-safe. Methods may throw c10::Error as libtorch does.
class TensorCopies {
 public:
  void Begin() { next_ = 0; }
  // Returns a contiguous copy on the host, of the same type, of a tensor on any device. It has its
  // values after Finish, until which `tensor` must keep them.
  absl::StatusOr<at::Tensor> Add(const at::Tensor& tensor);
  absl::Status Finish();

 private:
  // Returns memory for the next copy.
  at::Tensor Next(const at::Tensor& tensor);

  HostCopies from_device_;
  std::vector<at::Tensor> memory_;
  size_t next_ = 0;  // of memory_, for the next copy
};

}  // namespace tandem

#endif  // TANDEM_COMMON_TENSOR_ATEN_TENSOR_COPIES_H_
