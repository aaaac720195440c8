#include "common/weights/weight_snapshot.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <filesystem>
#include <memory>
#include <mutex>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "common/base/errors/status_macros.h"
#include "common/base/files/file_descriptor.h"
#include "common/weights/weights_digest.h"

namespace tandem {
namespace {

struct SnapshotFile {
  SnapshotFile(FileDescriptor opened, int64_t size) : file(std::move(opened)), bytes(size) {}

  const FileDescriptor file;
  const int64_t bytes;
};

// Keeps the file of the last released snapshot for the next one. A publication follows every step,
// and fresh pages cost more than the copy into them.
class SpareFile {
 public:
  static SpareFile& Get() {
    static auto* const spare = new SpareFile;
    return *spare;
  }

  absl::StatusOr<std::unique_ptr<SnapshotFile>> Take(int64_t bytes) {
    std::unique_ptr<SnapshotFile> spare = Exchange(nullptr);
    if (spare != nullptr && spare->bytes == bytes) return spare;
    spare = nullptr;  // its space may be needed
    std::error_code error;
    const std::string directory = std::filesystem::temp_directory_path(error).string();
    if (error) return FileError(error.value(), "no directory for temporary files:", "TMPDIR");
    TANDEM_ASSIGN_OR_RETURN(FileDescriptor file, FileDescriptor::CreateUnnamed(directory));
    TANDEM_RETURN_IF_ERROR(file.Reserve(bytes));
    return std::make_unique<SnapshotFile>(std::move(file), bytes);
  }

  void Return(std::unique_ptr<SnapshotFile> file) { Exchange(std::move(file)); }

 private:
  std::unique_ptr<SnapshotFile> Exchange(std::unique_ptr<SnapshotFile> file) {
    const std::lock_guard lock(mutex_);
    return std::exchange(file_, std::move(file));
  }

  std::mutex mutex_;
  std::unique_ptr<SnapshotFile> file_;
};

class Snapshot : public WeightSource {
 public:
  Snapshot(WeightManifest manifest, std::unique_ptr<SnapshotFile> file)
      : manifest_(std::move(manifest)), file_(std::move(file)) {}
  ~Snapshot() override { SpareFile::Get().Return(std::move(file_)); }

  const WeightManifest& manifest() const override { return manifest_; }

  absl::Status Read(int64_t offset, absl::Span<std::byte> out) const override {
    return file_->file.ReadAllAt(offset, out);
  }

 private:
  const WeightManifest manifest_;
  std::unique_ptr<SnapshotFile> file_;
};

absl::Status CheckTensor(const std::vector<WeightSpec>& expected, size_t index,
                         const std::string& name, const at::Tensor& tensor) {
  if (index == expected.size() || name != expected[index].name ||
      tensor.sizes() != at::IntArrayRef(expected[index].shape)) {
    return absl::InvalidArgumentError(absl::StrCat("tensor '", name, "' is not the expected one"));
  }
  if (tensor.is_floating_point()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("tensor '", name, "' is not floating-point"));
}

}  // namespace

absl::StatusOr<std::shared_ptr<const WeightSource>> MakeWeightSnapshot(
    const std::vector<WeightSpec>& tensors, TensorSource source, const WeightsVersion& weights,
    int64_t num_token_ids, std::vector<ComponentManifest> components) {
  WeightManifest manifest = {.version = weights.version,
                             .tensors = tensors,
                             .total_bytes = 0,
                             .digest = weights.digest,
                             .num_token_ids = num_token_ids,
                             .components = std::move(components)};
  for (WeightSpec& tensor : manifest.tensors) {
    tensor.dtype = DType::kFloat32;
    manifest.total_bytes += tensor.bytes();
  }
  TANDEM_ASSIGN_OR_RETURN(auto file, SpareFile::Get().Take(manifest.total_bytes));
  size_t given = 0;
  const auto checked = [&](TensorVisitor visit) {
    return source([&](const std::string& name, const at::Tensor& tensor) -> absl::Status {
      TANDEM_RETURN_IF_ERROR(CheckTensor(tensors, given++, name, tensor));
      return visit(name, tensor);
    });
  };
  int64_t offset = 0;
  TANDEM_RETURN_IF_ERROR(VisitOnHost(checked, [&](const at::Tensor& values) {
    const absl::Span bytes(static_cast<const std::byte*>(values.const_data_ptr()), values.nbytes());
    const int64_t to = std::exchange(offset, offset + static_cast<int64_t>(bytes.size()));
    return file->file.WriteAllAt(to, bytes);
  }));
  if (given < tensors.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("tensor '", tensors[given].name, "' was not given"));
  }
  return std::make_shared<Snapshot>(std::move(manifest), std::move(file));
}

}  // namespace tandem
