#include "common/weights/weights_digest.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "common/base/status_macros.h"
#include "common/tensor/host_copies.h"

namespace tandem {
void WeightsHasher::Add(const at::Tensor& tensor) {
  const at::NoGradGuard no_grad;
  // No copy where the values are float32 on the host already.
  const at::Tensor values = tensor.detach().cpu().to(at::kFloat).contiguous();
  checksum_.Update(values.const_data_ptr(), values.nbytes());
}

absl::StatusOr<std::string> WeightsDigest(TensorSource source) {
  WeightsHasher hasher;
  TANDEM_RETURN_IF_ERROR(VisitOnHost(source, [&](const at::Tensor& values) {
    hasher.Add(values);
    return absl::OkStatus();
  }));
  return hasher.Hex();
}

std::string WeightsDigest(const NamedTensors& tensors) { return *WeightsDigest(SourceOf(tensors)); }

absl::Status VisitOnHost(TensorSource source, ValuesVisitor visit) {
  HostCopies copies;
  TANDEM_RETURN_IF_ERROR(source([&](const std::string&, const at::Tensor& tensor) {
    return copies.Add(tensor, at::kFloat, visit);
  }));
  return copies.Finish();
}

}  // namespace tandem
