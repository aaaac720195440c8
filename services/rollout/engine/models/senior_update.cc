#include "services/rollout/engine/models/senior_update.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>

#include <cstddef>
#include <utility>

#include "common/base/errors/memory_error.h"
#include "common/base/errors/status_macros.h"
#include "common/model/compute_setup.h"
#include "common/tensor/aten/aten_bytes.h"
#include "common/tensor/aten/catch_torch_errors.h"
#include "services/rollout/engine/rollout_memory.h"

namespace tandem::rollout {
namespace {

// Returns a tensor that owns `bytes`.
at::Tensor TensorOf(const WeightSpec& spec, TensorBytes bytes) {
  std::byte* const data = bytes.release();
  return at::from_blob(
      data, spec.shape, [](void* memory) { delete[] static_cast<std::byte*>(memory); },
      at::device(at::kCPU).dtype(ToScalarType(spec.dtype)));
}

}  // namespace

SeniorUpdate::SeniorUpdate(const Model& senior, const speculator::Speculator* speculator,
                           bool keeps_tensors, Swap swap)
    : senior_(senior),
      speculator_(speculator),
      keeps_tensors_(keeps_tensors),
      swap_(std::move(swap)) {}

absl::Status SeniorUpdate::Add(const WeightSpec& spec, TensorBytes bytes) {
  ComputeAlone(senior_.device());
  const absl::Status added = CatchTorchErrors("weights", [&]() -> absl::Status {
    const at::Tensor tensor = TensorOf(spec, std::move(bytes));
    if (ComponentOf(spec) == kSpeculatorComponent) return AddToSpeculator(spec.name, tensor);
    if (weights_ == nullptr) weights_ = senior_.PrepareWeights();
    TANDEM_RETURN_IF_ERROR(weights_->Add(spec.name, tensor));
    if (keeps_tensors_) tensors_.emplace_back(spec.name, tensor);
    return absl::OkStatus();
  });
  return NameMemorySettings(added, kMemorySettings);
}

absl::Status SeniorUpdate::AddToSpeculator(const std::string& name, const at::Tensor& tensor) {
  if (next_speculator_ == nullptr) {
    TANDEM_ASSIGN_OR_RETURN(next_speculator_, speculator::PreparedSpeculator::Make(*speculator_));
  }
  return next_speculator_->Add(name, tensor);
}

absl::Status SeniorUpdate::Apply(const WeightManifest& manifest, const CallScope& call) {
  if (manifest.has_model()) TANDEM_RETURN_IF_ERROR(weights_->CheckComplete());
  return swap_(*this, manifest, call);
}

}  // namespace tandem::rollout
