#include "common/tensor/weights_digest.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <vector>

namespace tandem {
namespace {

// 1 GiB of float32: what a pack may take on the device beside the weights.
constexpr int64_t kMaxPackedValues = int64_t{1} << 28;

}  // namespace

void WeightsHasher::Add(const at::Tensor& tensor) {
  const at::NoGradGuard no_grad;
  // No copy where the values are that already.
  const at::Tensor values = tensor.detach().cpu().to(at::kFloat).contiguous();
  checksum_.Update(values.const_data_ptr(), values.nbytes());
}

std::string WeightsDigest(const NamedTensors& tensors) {
  WeightsHasher hasher;
  VisitOnHost(tensors, [&](const at::Tensor& values) { hasher.Add(values); });
  return hasher.Hex();
}

void VisitOnHost(const NamedTensors& tensors,
                 absl::FunctionRef<void(const at::Tensor& values)> visit) {
  const at::NoGradGuard no_grad;
  const auto on_host = [](const auto& entry) { return entry.second.is_cpu(); };
  if (!std::all_of(tensors.begin(), tensors.end(), on_host)) {
    VisitPacked(tensors, kMaxPackedValues, visit);
    return;
  }
  for (const auto& [name, tensor] : tensors) {
    visit(tensor.detach().to(at::kFloat).contiguous());
  }
}

void VisitPacked(const NamedTensors& tensors, int64_t max_values,
                 absl::FunctionRef<void(const at::Tensor& values)> visit) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> pack;
  int64_t packed = 0;
  const auto send = [&] {
    if (!pack.empty()) visit(at::cat(pack).cpu());
    pack.clear();
    packed = 0;
  };
  for (const auto& [name, tensor] : tensors) {
    if (packed + tensor.numel() > max_values) send();
    pack.push_back(tensor.detach().to(at::kFloat).flatten());
    packed += tensor.numel();
  }
  send();
}

}  // namespace tandem
