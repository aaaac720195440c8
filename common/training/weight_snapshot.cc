#include "common/training/weight_snapshot.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <cstring>
#include <mutex>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "common/tensor/dtype.h"
#include "common/tensor/weights_digest.h"

namespace tandem::training {
namespace {

struct Buffer {
  std::unique_ptr<std::byte[]> bytes;
  size_t size = 0;
};

// The memory of the last snapshot that was let go. A publish follows every step, and fresh pages
// cost five times the copy into them.
class SpareBuffer {
 public:
  static SpareBuffer& Get() {
    static auto* const spare = new SpareBuffer;
    return *spare;
  }

  Buffer Take(size_t size) {
    const std::lock_guard lock(mutex_);
    if (buffer_.size == size) return std::exchange(buffer_, {});
    buffer_ = {};
    return {std::make_unique_for_overwrite<std::byte[]>(size), size};
  }

  void Return(Buffer buffer) {
    const std::lock_guard lock(mutex_);
    buffer_ = std::move(buffer);
  }

 private:
  std::mutex mutex_;
  Buffer buffer_;
};

class Snapshot : public WeightSource {
 public:
  Snapshot(WeightManifest manifest, Buffer buffer)
      : manifest_(std::move(manifest)), buffer_(std::move(buffer)) {}
  ~Snapshot() override { SpareBuffer::Get().Return(std::move(buffer_)); }

  const WeightManifest& manifest() const override { return manifest_; }

  void Read(int64_t offset, absl::Span<std::byte> out) const override {
    std::memcpy(out.data(), buffer_.bytes.get() + offset, out.size());
  }

 private:
  const WeightManifest manifest_;
  Buffer buffer_;
};

}  // namespace

absl::StatusOr<std::shared_ptr<const WeightSource>> MakeWeightSnapshot(
    const NamedTensors& tensors, const WeightsVersion& weights) {
  const at::NoGradGuard no_grad;
  WeightManifest manifest = {
      .version = weights.version, .tensors = {}, .total_bytes = 0, .digest = weights.digest};
  for (const auto& [name, tensor] : tensors) {
    if (!tensor.is_floating_point()) {
      return absl::InvalidArgumentError(absl::StrCat("tensor '", name, "' is not floating-point"));
    }
    manifest.tensors.push_back(
        {.name = name, .dtype = DType::kFloat32, .shape = tensor.sizes().vec()});
    manifest.total_bytes += tensor.numel() * static_cast<int64_t>(sizeof(float));
  }
  Buffer buffer = SpareBuffer::Get().Take(static_cast<size_t>(manifest.total_bytes));
  std::byte* to = buffer.bytes.get();
  VisitOnHost(tensors, [&](const at::Tensor& values) {
    at::from_blob(to, values.sizes(), at::kFloat).copy_(values);
    to += values.nbytes();
  });
  return std::make_shared<Snapshot>(std::move(manifest), std::move(buffer));
}

}  // namespace tandem::training
