#include "services/rollout/engine/models/senior_update.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>

#include <cstddef>
#include <map>
#include <utility>

#include "absl/strings/string_view.h"
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
    Keep({.spec = spec, .values = tensor});
    return absl::OkStatus();
  });
  return NameMemorySettings(added, kMemorySettings);
}

void SeniorUpdate::Keep(KeptTensor tensor) {
  if (!keeps_tensors_ || ComponentOf(tensor.spec) != kModelComponent) return;
  tensors_.push_back(std::move(tensor));
}

absl::Status SeniorUpdate::AddShared(const WeightSpec& spec, absl::Span<const SharedRange> ranges) {
  ComputeAlone(senior_.device());
  const absl::Status added = CatchTorchErrors("weights", [&]() -> absl::Status {
    TANDEM_RETURN_IF_ERROR(Prepare(spec));
    TANDEM_RETURN_IF_ERROR(
        intake_->Take(spec, ranges, [&](const at::Tensor& tensor) { return Pack(spec, tensor); }));
    Keep({.spec = spec, .values = {}, .ranges = {ranges.begin(), ranges.end()}});
    return absl::OkStatus();
  });
  return NameMemorySettings(added, kMemorySettings);
}

absl::StatusOr<std::vector<ReadTensor>> SeniorUpdate::TakeRead() {
  if (!intake_.has_value()) return std::vector<ReadTensor>();
  return CatchTorchErrors("weights", [&]() -> absl::StatusOr<std::vector<ReadTensor>> {
    std::vector<ReadTensor> read = intake_->TakeRead();
    std::map<absl::string_view, WordSums> sums;
    for (const ReadTensor& tensor : read) sums[tensor.name] = tensor.sums;
    for (KeptTensor& kept : tensors_) {
      if (const auto found = sums.find(kept.spec.name); found != sums.end()) {
        kept.sums = found->second;
      }
    }
    return read;
  });
}

absl::Status SeniorUpdate::Apply(const WeightManifest& manifest, const CallScope& call) {
  if (manifest.has_model()) TANDEM_RETURN_IF_ERROR(weights_->CheckComplete());
  return swap_(*this, manifest, call);
}

}  // namespace tandem::rollout
