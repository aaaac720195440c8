#include "common/tensor/safetensors/safetensors.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/bounded_json.h"
#include "common/base/errors/status_macros.h"
#include "common/base/files/atomic_file.h"
#include "common/base/files/file_descriptor.h"
#include "common/base/files/paths/confined_folder.h"
#include "common/base/git_lfs.h"
#include "common/tensor/safetensors/safetensors_header.h"

namespace tandem {
namespace {

constexpr size_t kMaxIndexBytes = 100'000'000;
constexpr char kIndexName[] = "model.safetensors.index.json";

}  // namespace

absl::StatusOr<std::unique_ptr<SafetensorsFile>> SafetensorsFile::Open(const std::string& path) {
  TANDEM_ASSIGN_OR_RETURN(const FileDescriptor fd, FileDescriptor::OpenRegular(path));
  TANDEM_ASSIGN_OR_RETURN(const int64_t size, fd.Size());
  const auto file_bytes = static_cast<uint64_t>(size);
  if (file_bytes < sizeof(uint64_t)) {
    return absl::DataLossError(
        absl::StrCat(path, ": truncated: ", file_bytes, " bytes, not even a header length"));
  }

  std::unique_ptr<SafetensorsFile> file(new SafetensorsFile);
  file->path_ = path;
  file->mapping_bytes_ = file_bytes;
  file->mapping_ = mmap(nullptr, file_bytes, PROT_READ, MAP_PRIVATE, fd.get(), 0);
  if (file->mapping_ == MAP_FAILED) {
    file->mapping_ = nullptr;
    return FileError(errno, "cannot map", path);
  }
  const std::byte* base = static_cast<const std::byte*>(file->mapping_);
  if (IsGitLfsPointer({reinterpret_cast<const char*>(base), file_bytes})) {
    return GitLfsPointerError(path);
  }
  uint64_t header_bytes = 0;
  for (int i = 7; i >= 0; --i) header_bytes = header_bytes << 8 | static_cast<uint64_t>(base[i]);
  if (header_bytes > kMaxHeaderBytes) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": header length ", header_bytes,
                                                   " exceeds the limit of ", kMaxHeaderBytes));
  }
  if (header_bytes > file_bytes - sizeof(uint64_t)) {
    return absl::DataLossError(absl::StrCat(path, ": truncated: header length ", header_bytes,
                                            " in a file of ", file_bytes, " bytes"));
  }
  const std::byte* data = base + sizeof(uint64_t) + header_bytes;
  TANDEM_RETURN_IF_ERROR(file->ParseHeader(
      absl::string_view(reinterpret_cast<const char*>(base) + sizeof(uint64_t), header_bytes), data,
      file_bytes - sizeof(uint64_t) - header_bytes));
  return file;
}

SafetensorsFile::~SafetensorsFile() {
  if (mapping_ != nullptr) munmap(mapping_, mapping_bytes_);
}

absl::Status SafetensorsFile::ParseHeader(absl::string_view text, const std::byte* data,
                                          size_t data_bytes) {
  TANDEM_ASSIGN_OR_RETURN(SafetensorsHeader header, ParseSafetensorsHeader(text, path_));
  metadata_ = std::move(header.metadata);
  uint64_t used = 0;
  for (SafetensorsEntry& entry : header.entries) {
    if (entry.end > data_bytes) {
      return absl::DataLossError(absl::StrCat(path_, ": tensor '", entry.name,
                                              "': truncated: ends at byte ", entry.end,
                                              " of a data section of ", data_bytes));
    }
    used = entry.end;
    by_name_[entry.name] = tensors_.size();
    tensors_.push_back({std::move(entry.name), entry.dtype, std::move(entry.shape),
                        data + entry.begin, entry.end - entry.begin, path_});
  }
  if (used != data_bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat(path_, ": ", data_bytes - used, " bytes after the last tensor"));
  }
  return absl::OkStatus();
}

const TensorView* SafetensorsFile::Find(absl::string_view name) const {
  const auto found = by_name_.find(std::string(name));
  return found == by_name_.end() ? nullptr : &tensors_[found->second];
}

absl::StatusOr<std::unique_ptr<SafetensorsDirectory>> SafetensorsDirectory::Open(
    const std::string& directory) {
  namespace fs = std::filesystem;
  std::unique_ptr<SafetensorsDirectory> result(new SafetensorsDirectory);
  result->directory_ = directory;
  const std::string single = fs::path(directory) / "model.safetensors";
  const std::string index_path = fs::path(directory) / kIndexName;
  std::error_code ignored;
  if (fs::exists(SystemPath(single), ignored)) {
    TANDEM_RETURN_IF_ERROR(result->AddFile(single));
    return result;
  }
  if (!fs::exists(SystemPath(index_path), ignored)) {
    return absl::NotFoundError(
        absl::StrCat(directory, ": neither model.safetensors nor ", kIndexName));
  }

  TANDEM_ASSIGN_OR_RETURN(const std::string text, ReadFile(index_path, kMaxIndexBytes));
  TANDEM_ASSIGN_OR_RETURN(const nlohmann::json index, ParseBoundedJson(text, index_path));
  if (!index.is_object() || !index.contains("weight_map") || !index["weight_map"].is_object()) {
    return absl::InvalidArgumentError(absl::StrCat(index_path, ": no object 'weight_map'"));
  }
  std::map<std::string, std::set<std::string>> tensors_of_shard;
  for (const auto& [name, shard] : index["weight_map"].items()) {
    const std::string shard_name = shard.is_string() ? shard.get<std::string>() : "";
    if (shard_name.empty() || shard_name.find('/') != std::string::npos ||
        shard_name.find('\\') != std::string::npos || shard_name == "." || shard_name == "..") {
      return absl::InvalidArgumentError(
          absl::StrCat(index_path, ": tensor '", name,
                       "': the shard must be a file name inside the index's directory"));
    }
    tensors_of_shard[shard_name].insert(name);
  }
  for (auto& [shard, names] : tensors_of_shard) {
    const std::string path = fs::path(directory) / shard;
    if (!fs::exists(SystemPath(path), ignored)) {
      return absl::NotFoundError(absl::StrCat(path, ": missing shard, ", kIndexName,
                                              " names it for tensor '", *names.begin(), "'"));
    }
    TANDEM_RETURN_IF_ERROR(result->AddFile(path));
    for (const TensorView& view : result->files_.back()->tensors()) {
      if (names.erase(view.name) == 0) {
        return absl::InvalidArgumentError(absl::StrCat(path, ": tensor '", view.name, "': not in ",
                                                       kIndexName, " for this shard"));
      }
    }
    if (!names.empty()) {
      return absl::InvalidArgumentError(absl::StrCat(
          path, ": tensor '", *names.begin(), "': missing, ", kIndexName, " places it here"));
    }
  }
  return result;
}

absl::Status SafetensorsDirectory::AddFile(const std::string& path) {
  TANDEM_ASSIGN_OR_RETURN(auto file, SafetensorsFile::Open(path));
  tensors_.insert(tensors_.end(), file->tensors().begin(), file->tensors().end());
  std::sort(tensors_.begin(), tensors_.end(),
            [](const TensorView& a, const TensorView& b) { return a.name < b.name; });
  files_.push_back(std::move(file));
  return absl::OkStatus();
}

const TensorView* SafetensorsDirectory::Find(absl::string_view name) const {
  const auto found = std::lower_bound(
      tensors_.begin(), tensors_.end(), name,
      [](const TensorView& view, absl::string_view wanted) { return view.name < wanted; });
  return found == tensors_.end() || found->name != name ? nullptr : &*found;
}

}  // namespace tandem
