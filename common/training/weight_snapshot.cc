#include "common/training/weight_snapshot.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "common/base/status_macros.h"
#include "common/tensor/aten_bytes.h"
#include "common/tensor/checksum.h"

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
      TANDEM_ASSIGN_OR_RETURN(const DType dtype, FromScalarType(tensor.scalar_type()));
      const at::Tensor copy = tensor.detach().contiguous().clone();
      TANDEM_RETURN_IF_ERROR(AsView(name, copy).status());
      snapshot->manifest_.tensors.push_back(
          {.name = name, .dtype = dtype, .shape = tensor.sizes().vec()});
      snapshot->offsets_.push_back(snapshot->manifest_.total_bytes);
      snapshot->manifest_.total_bytes += static_cast<int64_t>(copy.nbytes());
      snapshot->tensors_.emplace_back(name, copy);
    }
    snapshot->manifest_.digest = WeightStreamDigest(snapshot->tensors_);
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

std::string WeightStreamDigest(const NamedTensors& tensors) {
  Checksum checksum;
  for (const auto& [name, tensor] : tensors) {
    checksum.Update(tensor.const_data_ptr(), tensor.nbytes());
  }
  return checksum.Hex();
}

absl::StatusOr<std::shared_ptr<const WeightSource>> MakeWeightSnapshot(const NamedTensors& tensors,
                                                                       int64_t version) {
  return Snapshot::Create(tensors, version);
}

}  // namespace tandem::training
