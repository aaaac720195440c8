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
                           bool keeps_tensors, std::optional<c10::Stream> intake, Swap swap)
    : senior_(senior),
      speculator_(speculator),
      keeps_tensors_(keeps_tensors),
      swap_(std::move(swap)) {
  if (intake.has_value()) intake_.emplace(*intake);
}

absl::Status SeniorUpdate::Prepare(const WeightSpec& spec) {
  if (ComponentOf(spec) == kSpeculatorComponent) {
    if (next_speculator_ != nullptr) return absl::OkStatus();
    TANDEM_ASSIGN_OR_RETURN(next_speculator_, speculator::PreparedSpeculator::Make(*speculator_));
  } else if (weights_ == nullptr) {
    weights_ = senior_.PrepareWeights();
  }
  return absl::OkStatus();
}

absl::Status SeniorUpdate::Pack(const WeightSpec& spec, const at::Tensor& tensor) {
  if (ComponentOf(spec) == kSpeculatorComponent) return next_speculator_->Add(spec.name, tensor);
  return weights_->Add(spec.name, tensor);
}

absl::Status SeniorUpdate::Add(const WeightSpec& spec, TensorBytes bytes) {
  ComputeAlone(senior_.device());
  const absl::Status added = CatchTorchErrors("weights", [&]() -> absl::Status {
    const at::Tensor tensor = TensorOf(spec, std::move(bytes));
    TANDEM_RETURN_IF_ERROR(Prepare(spec));
    TANDEM_RETURN_IF_ERROR(Pack(spec, tensor));
    if (keeps_tensors_ && ComponentOf(spec) == kModelComponent) {
      tensors_.emplace_back(spec.name, tensor);
    }
    return absl::OkStatus();
  });
  return NameMemorySettings(added, kMemorySettings);
}

absl::Status SeniorUpdate::AddShared(const WeightSpec& spec, absl::Span<const SharedRange> ranges) {
  ComputeAlone(senior_.device());
  const absl::Status added = CatchTorchErrors("weights", [&]() -> absl::Status {
    TANDEM_RETURN_IF_ERROR(Prepare(spec));
    return intake_->Take(spec, ranges,
                         [&](const at::Tensor& tensor) { return Pack(spec, tensor); });
  });
  return NameMemorySettings(added, kMemorySettings);
}

absl::StatusOr<std::vector<ReadTensor>> SeniorUpdate::TakeRead() {
  if (!intake_.has_value()) return std::vector<ReadTensor>();
  return CatchTorchErrors(
      "weights", [&]() -> absl::StatusOr<std::vector<ReadTensor>> { return intake_->TakeRead(); });
}

absl::Status SeniorUpdate::Apply(const WeightManifest& manifest, const CallScope& call) {
  if (manifest.has_model()) TANDEM_RETURN_IF_ERROR(weights_->CheckComplete());
  return swap_(*this, manifest, call);
}

}  // namespace tandem::rollout
