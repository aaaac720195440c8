#include "common/training/weight_snapshot.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "common/tensor/dtype.h"
#include "common/tensor/weights_digest.h"

namespace tandem::training {
namespace {

class Snapshot : public WeightSource {
 public:
  static absl::StatusOr<std::shared_ptr<const WeightSource>> Create(const NamedTensors& tensors,
                                                                    int64_t version) {
    const at::NoGradGuard no_grad;
    auto snapshot = std::make_shared<Snapshot>();
    snapshot->manifest_.version = version;
    for (const auto& [name, tensor] : tensors) {
      if (!tensor.is_floating_point()) {
        return absl::InvalidArgumentError(
            absl::StrCat("tensor '", name, "' is not floating-point"));
      }
      const at::Tensor copy = at::empty(tensor.sizes(), at::kFloat);
      copy.copy_(tensor);
      snapshot->manifest_.tensors.push_back(
          {.name = name, .dtype = DType::kFloat32, .shape = tensor.sizes().vec()});
      snapshot->offsets_.push_back(snapshot->manifest_.total_bytes);
      snapshot->manifest_.total_bytes += static_cast<int64_t>(copy.nbytes());
      snapshot->tensors_.emplace_back(name, copy);
    }
    snapshot->manifest_.digest = WeightsDigest(snapshot->tensors_);
    return snapshot;
  }

  const WeightManifest& manifest() const override { return manifest_; }

  void Read(int64_t offset, absl::Span<std::byte> out) const override {
    auto found = std::upper_bound(offsets_.begin(), offsets_.end(), offset);
    auto i = static_cast<size_t>(found - offsets_.begin()) - 1;
    while (!out.empty()) {
      const at::Tensor& tensor = tensors_[i].second;
      const auto begin = static_cast<size_t>(offset - offsets_[i]);
      const size_t count = std::min(out.size(), tensor.nbytes() - begin);
      std::memcpy(out.data(), static_cast<const char*>(tensor.const_data_ptr()) + begin, count);
      out.remove_prefix(count);
      offset += static_cast<int64_t>(count);
      ++i;
    }
  }

 private:
  WeightManifest manifest_;
  NamedTensors tensors_;
  std::vector<int64_t> offsets_;  // of each tensor in the stream
};

}  // namespace

absl::StatusOr<std::shared_ptr<const WeightSource>> MakeWeightSnapshot(const NamedTensors& tensors,
                                                                       int64_t version) {
  return Snapshot::Create(tensors, version);
}

}  // namespace tandem::training
