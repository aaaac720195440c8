// The digest by which servers recognise weights.
#ifndef TANDEM_COMMON_TENSOR_WEIGHTS_DIGEST_H_
#define TANDEM_COMMON_TENSOR_WEIGHTS_DIGEST_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/base/checksum.h"
#include "common/tensor/named_tensors.h"

namespace tandem {

// XXH3-128 of the tensors' values as float32, little endian, one after the other: the digest of the
// byte stream that a WeightManifest of float32 tensors in that order describes.
class WeightsHasher {
 public:
  // Any floating type, any device.
  void Add(const at::Tensor& tensor);
  std::string Hex() const { return checksum_.Hex(); }

 private:
  Checksum checksum_;
};

std::string WeightsDigest(const NamedTensors& tensors);
// Of what `source` gives. Its errors.
absl::StatusOr<std::string> WeightsDigest(TensorSource source);

// Calls `visit` with all values that `source` gives, as float32 on the host, in order. Those that
// are on the host come tensor by tensor, without a copy where they are float32; those of a device
// packed, so that it is waited for once for many of them. Errors of `source` and `visit`.
using ValuesVisitor = absl::FunctionRef<absl::Status(const at::Tensor& values)>;
absl::Status VisitOnHost(TensorSource source, ValuesVisitor visit);

// The packed way, for tensors of one device: `max_values` at a time, in memory of that size on the
// device; tensors that are larger alone.
absl::Status VisitPacked(TensorSource source, int64_t max_values, ValuesVisitor visit);

}  // namespace tandem

#endif  // TANDEM_COMMON_TENSOR_WEIGHTS_DIGEST_H_
