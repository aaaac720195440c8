#include "common/tensor/weights_digest.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

namespace tandem {

void WeightsHasher::Add(const at::Tensor& tensor) {
  const at::NoGradGuard no_grad;
  // No copy where the values are that already.
  const at::Tensor values = tensor.detach().cpu().to(at::kFloat).contiguous();
  checksum_.Update(values.const_data_ptr(), values.nbytes());
}

std::string WeightsDigest(const NamedTensors& tensors) {
  WeightsHasher hasher;
  for (const auto& [name, tensor] : tensors) hasher.Add(tensor);
  return hasher.Hex();
}

}  // namespace tandem
