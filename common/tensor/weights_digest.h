// The digest by which servers recognise weights.
#ifndef TANDEM_COMMON_TENSOR_WEIGHTS_DIGEST_H_
#define TANDEM_COMMON_TENSOR_WEIGHTS_DIGEST_H_

#include <ATen/core/Tensor.h>

#include <string>

#include "common/tensor/checksum.h"
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

}  // namespace tandem

#endif  // TANDEM_COMMON_TENSOR_WEIGHTS_DIGEST_H_
