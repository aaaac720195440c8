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
#include "common/weights/copied_tensors.h"
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

class FileSnapshot : public WeightSource {
 public:
  FileSnapshot(WeightManifest manifest, std::vector<WordSums> sums,
               std::unique_ptr<SnapshotFile> file)
      : manifest_(std::move(manifest)), sums_(std::move(sums)), file_(std::move(file)) {}
  ~FileSnapshot() override { SpareFile::Get().Return(std::move(file_)); }

  const WeightManifest& manifest() const override { return manifest_; }
  absl::Span<const WordSums> sums() const override { return sums_; }

  absl::Status Read(int64_t offset, absl::Span<std::byte> out) const override {
    return file_->file.ReadAllAt(offset, out);
  }
  const FileDescriptor* file() const override { return &file_->file; }

 private:
  const WeightManifest manifest_;
  const std::vector<WordSums> sums_;
  std::unique_ptr<SnapshotFile> file_;
};

// Writes float32 values to a file in the types of their tensors, one tensor behind the other, and
// adds up what it writes. The values are read from memory once.
class TensorWriter {
 public:
  TensorWriter(const std::vector<WeightSpec>& tensors, const SnapshotFile& file)
      : tensors_(tensors), file_(file), places_(tensors.size()) {
    // The digest of float32 values is known already.
    if (!std::ranges::all_of(tensors, &IsFloat32)) sums_.resize(tensors.size());
    int64_t begin = 0;
    for (size_t i = 0; i < tensors.size(); ++i) {
      places_[i].begin = std::exchange(begin, begin + tensors[i].bytes());
    }
  }

  // Writes the next values of tensors [first, last), which are one tensor in several types.
  absl::Status Write(size_t first, size_t last, const at::Tensor& values) {
    for (int64_t begin = 0; begin < values.numel(); begin += kCachedValues) {
      const at::Tensor some =
          values.narrow(0, begin, std::min(kCachedValues, values.numel() - begin));
      if (!sums_.empty()) {
        const std::string& name = tensors_[first].name;
        if (ComponentOf(tensors_[first]) == kModelComponent) {
          model_.Add(name, SumOf(places_[first].values, some));
        }
      }
      for (size_t i = first; i < last; ++i) {
        TANDEM_RETURN_IF_ERROR(WriteAs(i, some.to(ToScalarType(tensors_[i].dtype))));
      }
    }
    return absl::OkStatus();
  }

  // Returns the digest of the model's tensors as float32, if sums are needed.
  std::string ModelDigest() const { return model_.Digest(); }
  // Returns the sums of each tensor as it was written; empty if all are float32.
  const std::vector<WordSums>& sums() const { return sums_; }

 private:
  static constexpr int64_t kCachedValues = 1 << 20;
  // The place of a tensor in the file, and the number of its values that were written.
  struct Place {
    int64_t begin = 0, values = 0;
  };

  static WordSums SumOf(int64_t first, const at::Tensor& values) {
    constexpr int64_t kWordBytes = 4;
    const auto* const data = static_cast<const char*>(values.const_data_ptr());
    const auto bytes = static_cast<int64_t>(values.nbytes());
    const int64_t begin = first * values.element_size() / kWordBytes, words = bytes / kWordBytes;
    WordSums sums = SumWordsInParallel(begin, data, words);
    return sums += SumBytes(begin + words, data + words * kWordBytes, bytes % kWordBytes);
  }

  absl::Status WriteAs(size_t tensor, const at::Tensor& values) {
    Place& place = places_[tensor];
    if (!sums_.empty()) sums_[tensor] += SumOf(place.values, values);
    const int64_t to = place.begin + place.values * values.element_size();
    place.values += values.numel();
    return file_.file.WriteAllAt(
        to, {static_cast<const std::byte*>(values.const_data_ptr()), values.nbytes()});
  }

  const std::vector<WeightSpec>& tensors_;
  const SnapshotFile& file_;
  std::vector<Place> places_;
  std::vector<WordSums> sums_;
  TensorSums model_;
};

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

WeightManifest ManifestOf(std::vector<WeightSpec> tensors, const WeightsVersion& weights,
                          int64_t num_token_ids, std::vector<ComponentManifest> components,
                          std::string adapter) {
  WeightManifest manifest = {.version = weights.version,
                             .tensors = std::move(tensors),
                             .total_bytes = 0,
                             .digest = weights.digest,
                             .num_token_ids = num_token_ids,
                             .components = std::move(components),
                             .adapter = std::move(adapter)};
  for (const WeightSpec& tensor : manifest.tensors) manifest.total_bytes += tensor.bytes();
  return manifest;
}

absl::StatusOr<std::shared_ptr<const WeightSource>> MakeWeightSnapshot(WeightManifest manifest,
                                                                       TensorSource source) {
  TANDEM_ASSIGN_OR_RETURN(auto file, SpareFile::Get().Take(manifest.total_bytes));
  TensorWriter writer(manifest.tensors, *file);
  HostCopies copies;
  TANDEM_RETURN_IF_ERROR(VisitTensors(
      manifest.tensors, source, [&](size_t first, size_t last, const at::Tensor& tensor) {
        return copies.Add(tensor, at::kFloat, [&writer, first, last](const at::Tensor& values) {
          return writer.Write(first, last, values);
        });
      }));
  TANDEM_RETURN_IF_ERROR(copies.Finish());
  TANDEM_RETURN_IF_ERROR(CheckCopiedModel(manifest, writer.ModelDigest()));
  std::vector<WordSums> sums = writer.sums();
  return std::make_shared<FileSnapshot>(std::move(manifest), std::move(sums), std::move(file));
}

}  // namespace tandem
