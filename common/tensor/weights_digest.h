// The digest by which servers recognise weights.
#ifndef TANDEM_COMMON_TENSOR_WEIGHTS_DIGEST_H_
#define TANDEM_COMMON_TENSOR_WEIGHTS_DIGEST_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

#include "absl/functional/function_ref.h"
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

// Calls `visit` with all values of the tensors as float32 on the host, in order. Those that are on
// the host come one by one, without a copy where they are float32; those of another device packed,
// so that the device is waited for once for many of them.
void VisitOnHost(const NamedTensors& tensors,
                 absl::FunctionRef<void(const at::Tensor& values)> visit);

// The packed way, for tensors of one device: at most `max_values` at a time, or one tensor.
void VisitPacked(const NamedTensors& tensors, int64_t max_values,
                 absl::FunctionRef<void(const at::Tensor& values)> visit);

}  // namespace tandem

#endif  // TANDEM_COMMON_TENSOR_WEIGHTS_DIGEST_H_
