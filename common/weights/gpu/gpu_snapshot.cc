#include "common/weights/gpu/gpu_snapshot.h"

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "absl/types/span.h"
#include "common/base/errors/status_macros.h"
#include "common/base/machine/gpu_memory.h"
#include "common/tensor/aten/catch_torch_errors.h"
#include "common/weights/copied_tensors.h"
#include "common/weights/weight_components.h"
#include "common/weights/word_sums.h"

namespace tandem {
namespace {

class GpuSnapshot final : public WeightSource {
 public:
  GpuSnapshot(WeightManifest manifest, std::vector<WordSums> sums,
              std::unique_ptr<const GpuCopy> own, std::shared_ptr<const PeerMemory> others)
      : manifest_(std::move(manifest)),
        sums_(std::move(sums)),
        own_(std::move(own)),
        others_(std::move(others)) {
    if (own_ != nullptr) memories_.push_back(own_->memory());
    if (others_ == nullptr) return;
    memories_.insert(memories_.end(), others_->shared().begin(), others_->shared().end());
  }

  const WeightManifest& manifest() const override { return manifest_; }
  absl::Span<const WordSums> sums() const override { return sums_; }
  absl::Span<const GpuMemory> gpu_memories() const override { return memories_; }

  absl::Status Read(int64_t offset, absl::Span<std::byte> out) const override {
    return CatchTorchErrors("copy of the weights", [&]() -> absl::Status {
      const c10::Device device = own_ != nullptr ? own_->device() : others_->device();
      // Beside the training steps, which have the default stream.
      const c10::impl::VirtualGuardImpl gpu(device.type());
      const c10::StreamGuard guard(gpu.getStreamFromGlobalPool(device));
      const int64_t own_bytes = own_ != nullptr ? own_->memory().size : 0;
      const auto here = static_cast<size_t>(
          std::clamp<int64_t>(own_bytes - offset, 0, static_cast<int64_t>(out.size())));
      if (here > 0) own_->Read(offset, out.first(here));
      if (here == out.size()) return absl::OkStatus();
      return others_->Read(std::max<int64_t>(offset - own_bytes, 0), out.subspan(here));
    });
  }

 private:
  const WeightManifest manifest_;
  const std::vector<WordSums> sums_;
  const std::unique_ptr<const GpuCopy> own_;
  const std::shared_ptr<const PeerMemory> others_;
  std::vector<GpuMemory> memories_;
};

}  // namespace

absl::StatusOr<std::shared_ptr<const WeightSource>> MakeGpuSnapshot(
    WeightManifest manifest, std::unique_ptr<const GpuCopy> own,
    std::shared_ptr<const PeerMemory> others, const std::vector<CopySums>& sums) {
  std::vector<WordSums> all;
  TensorSums model;
  for (const CopySums& part : sums) {
    for (size_t i = 0; i < part.sums.size(); ++i) {
      const WeightSpec& tensor = manifest.tensors[all.size()];
      if (ComponentOf(tensor) == kModelComponent) model.Add(tensor.name, part.model_sums[i]);
      all.push_back(part.sums[i]);
    }
  }
  TANDEM_RETURN_IF_ERROR(CheckCopiedModel(manifest, model.Digest()));
  return std::make_shared<GpuSnapshot>(std::move(manifest), std::move(all), std::move(own),
                                       std::move(others));
}

}  // namespace tandem
