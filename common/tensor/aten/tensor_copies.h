// Copies of tensors in the host's memory, for work beside the thread that changes them.
#ifndef TANDEM_COMMON_TENSOR_ATEN_TENSOR_COPIES_H_
#define TANDEM_COMMON_TENSOR_ATEN_TENSOR_COPIES_H_

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/tensor/aten/host_copies.h"
#include "common/tensor/aten/named_tensors.h"

namespace tandem {

// Collects copies of tensors of any device, contiguous and of the tensors' own types. Not
// thread-safe. Methods may throw c10::Error as libtorch does.
class TensorCopies {
 public:
  // Adds a copy of `tensor`, which must keep its values until Take.
  absl::Status Add(const std::string& name, const at::Tensor& tensor);
  // Adds a tensor of the host itself, whose values nobody changes.
  void AddUnchanging(const std::string& name, const at::Tensor& tensor);
  // Returns all of them, in their order.
  absl::StatusOr<NamedTensors> Take() &&;

 private:
  HostCopies from_device_;
  NamedTensors copies_;
};

}  // namespace tandem

#endif  // TANDEM_COMMON_TENSOR_ATEN_TENSOR_COPIES_H_
