#include "services/rollout/engine/shard_weights.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>

#include "common/tensor/aten_bytes.h"

namespace tandem::rollout {
namespace {

// Broadcasts the bytes, as Gloo has no bfloat16.
void BroadcastBytesOf(const at::Tensor& tensor, ranks::Communicator& group) {
  at::Tensor bytes = tensor.view(-1).view(at::kByte);
  group.Broadcast(bytes, 0);
}

}  // namespace

RankedWeights WeightsToSend(const NamedTensors& tensors, const Model& model) {
  RankedWeights weights;
  for (const auto& [name, tensor] : tensors) {
    const std::vector<Parameter>& declared = model.DeclaredParameters();
    if (std::none_of(declared.begin(), declared.end(),
                     [&](const Parameter& parameter) { return parameter.spec.name == name; })) {
      continue;  // a tied head
    }
    weights.tensors.push_back({.name = name,
                               .dtype = FromScalarType(tensor.scalar_type()).value(),
                               .shape = tensor.sizes().vec()});
  }
  return weights;
}

void SendWeights(const RankedWeights& weights, const NamedTensors& tensors,
                 ranks::Communicator& group) {
  for (const WeightSpec& spec : weights.tensors) {
    const auto found = std::find_if(tensors.begin(), tensors.end(),
                                    [&](const auto& named) { return named.first == spec.name; });
    BroadcastBytesOf(found->second.to(group.device()).contiguous(), group);
  }
}

void ReceiveWeights(const RankedWeights& weights, ranks::Communicator& group, Model& model) {
  const at::NoGradGuard no_grad;
  for (const WeightSpec& spec : weights.tensors) {
    const at::Tensor whole =
        at::empty(spec.shape, at::device(group.device()).dtype(ToScalarType(spec.dtype)));
    BroadcastBytesOf(whole, group);
    for (const Parameter& parameter : model.DeclaredParameters()) {
      if (parameter.spec.name == spec.name) parameter.CopyFrom(whole);
    }
  }
  model.OnWeightsChanged();
}

}  // namespace tandem::rollout
