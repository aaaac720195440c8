#include "common/weights/weight_snapshot.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <filesystem>
#include <memory>
#include <mutex>
#include <set>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "common/base/errors/status_macros.h"
#include "common/base/files/file_descriptor.h"
#include "common/tensor/aten/aten_bytes.h"
#include "common/tensor/aten/host_copies.h"
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
  Snapshot(WeightManifest manifest, std::vector<WordSums> sums, std::unique_ptr<SnapshotFile> file)
      : manifest_(std::move(manifest)), sums_(std::move(sums)), file_(std::move(file)) {}
  ~Snapshot() override { SpareFile::Get().Return(std::move(file_)); }

  const WeightManifest& manifest() const override { return manifest_; }
  absl::Span<const WordSums> sums() const override { return sums_; }

  absl::Status Read(int64_t offset, absl::Span<std::byte> out) const override {
    return file_->file.ReadAllAt(offset, out);
  }

 private:
  const WeightManifest manifest_;
  const std::vector<WordSums> sums_;
  std::unique_ptr<SnapshotFile> file_;
};

// Writes tensors to a file, one behind the other, and sums up what it writes.
class TensorWriter {
 public:
  TensorWriter(const std::vector<WeightSpec>& tensors, const SnapshotFile& file)
      : file_(file), places_(tensors.size()) {
    // The digest of float32 values is known already.
    if (!std::ranges::all_of(tensors, &IsFloat32)) sums_.resize(tensors.size());
    int64_t begin = 0;
    for (size_t i = 0; i < tensors.size(); ++i) {
      places_[i].begin = std::exchange(begin, begin + tensors[i].bytes());
    }
  }

  // Writes the next values of a tensor.
  absl::Status Write(size_t tensor, const at::Tensor& values) {
    const absl::Span bytes(static_cast<const std::byte*>(values.const_data_ptr()), values.nbytes());
    Place& place = places_[tensor];
    if (!sums_.empty()) {
      const int64_t word = place.written / kWordBytes;
      const int64_t words = static_cast<int64_t>(bytes.size()) / kWordBytes;
      sums_[tensor] += SumWordsInParallel(word, bytes.data(), words);
      const auto rest = bytes.subspan(static_cast<size_t>(words * kWordBytes));
      sums_[tensor] += SumBytes(word + words, rest.data(), static_cast<int64_t>(rest.size()));
    }
    const int64_t to = place.begin + place.written;
    place.written += static_cast<int64_t>(bytes.size());
    return file_.file.WriteAllAt(to, bytes);
  }

  std::vector<WordSums> TakeSums() { return std::move(sums_); }

 private:
  static constexpr int64_t kWordBytes = 4;
  // Bytes of a tensor in the file.
  struct Place {
    int64_t begin = 0, written = 0;
  };

  const SnapshotFile& file_;
  std::vector<Place> places_;
  std::vector<WordSums> sums_;  // empty if all tensors are float32
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

std::vector<WeightSpec> InWantedTypes(const std::vector<WeightSpec>& tensors,
                                      const std::vector<TensorTypes>& receivers) {
  std::vector<WeightSpec> wanted;
  for (const WeightSpec& tensor : tensors) {
    std::set<DType> types;
    for (const TensorTypes& receiver : receivers) {
      const auto found = receiver.find(tensor.name);
      types.insert(found == receiver.end() ? DType::kFloat32 : found->second);
    }
    if (types.empty()) types.insert(DType::kFloat32);
    for (const DType type : types) {
      wanted.push_back({.name = tensor.name, .dtype = type, .shape = tensor.shape});
    }
  }
  return wanted;
}

absl::StatusOr<std::shared_ptr<const WeightSource>> MakeWeightSnapshot(
    const std::vector<WeightSpec>& tensors, TensorSource source, const WeightsVersion& weights,
    int64_t num_token_ids, std::vector<ComponentManifest> components) {
  WeightManifest manifest = {.version = weights.version,
                             .tensors = tensors,
                             .total_bytes = 0,
                             .digest = weights.digest,
                             .num_token_ids = num_token_ids,
                             .components = std::move(components)};
  for (const WeightSpec& tensor : tensors) manifest.total_bytes += tensor.bytes();
  TANDEM_ASSIGN_OR_RETURN(auto file, SpareFile::Get().Take(manifest.total_bytes));
  TensorWriter writer(tensors, *file);
  HostCopies copies;
  size_t next = 0;
  TANDEM_RETURN_IF_ERROR(
      source([&](const std::string& name, const at::Tensor& tensor) -> absl::Status {
        TANDEM_RETURN_IF_ERROR(CheckTensor(tensors, next, name, tensor));
        for (; next < tensors.size() && tensors[next].name == name; ++next) {
          const auto write = [&, index = next](const at::Tensor& values) {
            return writer.Write(index, values);
          };
          TANDEM_RETURN_IF_ERROR(copies.Add(tensor, ToScalarType(tensors[next].dtype), write));
        }
        return absl::OkStatus();
      }));
  TANDEM_RETURN_IF_ERROR(copies.Finish());
  if (next < tensors.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("tensor '", tensors[next].name, "' was not given"));
  }
  return std::make_shared<Snapshot>(std::move(manifest), writer.TakeSums(), std::move(file));
}

}  // namespace tandem
