// The digest by which servers recognise weights, and the visit of weights on the host.
#ifndef TANDEM_COMMON_WEIGHTS_WEIGHTS_DIGEST_H_
#define TANDEM_COMMON_WEIGHTS_WEIGHTS_DIGEST_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/base/checksum.h"
#include "common/tensor/named_tensors.h"

namespace tandem {

// Computes the XXH3-128 of the tensors' values as float32, little endian, one after the other. It
// is the digest of the byte stream that a WeightManifest of float32 tensors in that order
// describes.
class WeightsHasher {
 public:
  // Any floating type, any device.
  void Add(const at::Tensor& tensor);
  std::string Hex() const { return checksum_.Hex(); }

 private:
  Checksum checksum_;
};

std::string WeightsDigest(const NamedTensors& tensors);
// Returns the digest of the tensors that `source` gives, or its error.
absl::StatusOr<std::string> WeightsDigest(TensorSource source);

using ValuesVisitor = absl::FunctionRef<absl::Status(const at::Tensor& values)>;

// Calls `visit` with all values that `source` gives, as float32 on the host, in order: one call or
// several for a tensor (HostCopies). Errors are those of `source` and `visit`.
absl::Status VisitOnHost(TensorSource source, ValuesVisitor visit);

}  // namespace tandem

#endif  // TANDEM_COMMON_WEIGHTS_WEIGHTS_DIGEST_H_
