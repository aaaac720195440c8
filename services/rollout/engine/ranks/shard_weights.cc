#include "services/rollout/engine/ranks/shard_weights.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <string>

#include "common/base/errors/status_macros.h"
#include "common/model/compute_setup.h"
#include "common/tensor/aten/aten_bytes.h"
#include "common/tensor/aten/catch_torch_errors.h"
#include "common/weights/packing_thread.h"

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

ShardUpdate::ShardUpdate(const RankedWeights& weights, ranks::Communicator& group,
                         const Model& model, ranks::ServerRanks& server)
    : thread_([this, weights, &group, &model, &server] {
        BecomePackingThread();
        ComputeAlone(model.device());
        const absl::Status received =
            CatchTorchErrors("weights", [&] { return Receive(weights, group, model); });
        if (!received.ok()) server.Fail(std::string(received.message()));
      }) {}

absl::Status ShardUpdate::Receive(const RankedWeights& weights, ranks::Communicator& group,
                                  const Model& model) {
  weights_ = model.PrepareWeights();
  for (const WeightSpec& spec : weights.tensors) {
    const at::Tensor whole =
        at::empty(spec.shape, at::device(group.device()).dtype(ToScalarType(spec.dtype)));
    BroadcastBytesOf(whole, group);
    TANDEM_RETURN_IF_ERROR(weights_->Add(spec.name, whole));
  }
  return weights_->CheckComplete();
}

void ShardUpdate::AdoptInto(Model& model) {
  thread_.join();
  model.Adopt(*weights_);
}

}  // namespace tandem::rollout
