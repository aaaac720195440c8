#include "common/checkpoint/checkpoint.h"

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>
#include <system_error>
#include <tuple>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "common/base/atomic_file.h"
#include "common/base/bounded_json.h"
#include "common/base/checksum.h"
#include "common/base/error.h"
#include "common/base/field_check.h"
#include "common/base/status_macros.h"
#include "common/checkpoint/replace_directory.h"
#include "common/checkpoint/temporary_directory.h"

namespace tandem::checkpoint {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr char kFormat[] = "tandem-checkpoint";
constexpr int kFormatVersion = 2;
constexpr size_t kMaxManifestBytes = 16 << 20;

struct FileEntry {
  std::string name;
  int64_t bytes = 0;
  std::string digest;
};

struct Manifest {
  Identity identity;
  std::vector<FileEntry> files;
};

bool IsPlainName(const std::string& name) {
  return !name.empty() && name[0] != '.' && name.size() <= 200 &&
         name.find('/') == std::string::npos && name.find('\0') == std::string::npos;
}

absl::StatusOr<FileEntry> Describe(const fs::path& path) {
  FileEntry entry{.name = path.filename().string(), .bytes = 0, .digest = {}};
  Checksum checksum;
  TANDEM_RETURN_IF_ERROR(ForEachChunk(path.string(), [&](absl::string_view chunk) {
    checksum.Update(chunk.data(), chunk.size());
    entry.bytes += static_cast<int64_t>(chunk.size());
    return absl::OkStatus();
  }));
  entry.digest = checksum.Hex();
  return entry;
}

// DATA_LOSS for anything that is not exactly a manifest.
absl::StatusOr<Manifest> ReadManifest(const fs::path& directory) {
  const std::string path = (directory / kManifestFile).string();
  const auto broken = [&](absl::string_view why) {
    return absl::DataLossError(absl::StrCat(path, ": ", why));
  };
  const absl::StatusOr<std::string> text = ReadFile(path, kMaxManifestBytes);
  if (!text.ok()) return broken("the manifest is missing: the checkpoint is not complete");
  const absl::StatusOr<json> parsed = ParseBoundedJson(*text, path);
  if (!parsed.ok()) return absl::DataLossError(parsed.status().message());
  const json& document = *parsed;
  if (!document.is_object() || document.value("format", json()) != kFormat) {
    return broken("is not a manifest");
  }
  if (document.value("version", json()) != kFormatVersion) {
    return broken("is of a version that this build does not read");
  }
  if (!document.value("kind", json()).is_string() ||
      !document.value("step", json()).is_number_integer()) {
    return broken("does not say what it is a checkpoint of");
  }
  Manifest manifest{.identity = {document["kind"], document["step"]}, .files = {}};
  const json files = document.value("files", json());
  if (!files.is_array()) return broken("lists no files");
  for (const json& file : files) {
    if (!file.is_object() || !file.value("name", json()).is_string() ||
        !file.value("bytes", json()).is_number_integer() ||
        !file.value("xxh3_128", json()).is_string()) {
      return broken("holds a broken entry");
    }
    manifest.files.push_back({file["name"], file["bytes"], file["xxh3_128"]});
    if (!IsPlainName(manifest.files.back().name)) {
      return broken("names a file outside its directory");
    }
  }
  return manifest;
}

absl::StatusOr<int64_t> WriteManifest(const fs::path& directory, const Identity& identity) {
  std::vector<fs::path> paths;
  for (const fs::directory_entry& entry : fs::directory_iterator(directory)) {
    if (!entry.is_regular_file()) {
      return absl::InternalError(
          absl::StrCat(entry.path().string(), " is not a plain file; checkpoints hold no folders"));
    }
    paths.push_back(entry.path());
  }
  std::sort(paths.begin(), paths.end());
  json files = json::array();
  int64_t total = 0;
  for (const fs::path& path : paths) {
    TANDEM_RETURN_IF_ERROR(SyncPath(path.string()));
    TANDEM_ASSIGN_OR_RETURN(const FileEntry entry, Describe(path));
    files.push_back({{"name", entry.name}, {"bytes", entry.bytes}, {"xxh3_128", entry.digest}});
    total += entry.bytes;
  }
  const json manifest = {{"format", kFormat},
                         {"version", kFormatVersion},
                         {"kind", identity.kind},
                         {"step", identity.step},
                         {"files", files}};
  TANDEM_RETURN_IF_ERROR(
      WriteFileDurably((directory / kManifestFile).string(), manifest.dump(2) + "\n"));
  TANDEM_RETURN_IF_ERROR(SyncPath(directory.string()));
  return total;
}

// A Save replaces an earlier checkpoint of its kind and nothing else.
absl::Status CheckReplaceable(const fs::path& target, const std::string& kind) {
  std::error_code ignored;
  if (!fs::exists(fs::symlink_status(target, ignored))) return absl::OkStatus();
  const absl::StatusOr<Manifest> manifest = ReadManifest(target);
  if (!fs::is_symlink(target, ignored) && manifest.ok() && manifest->identity.kind == kind) {
    return absl::OkStatus();
  }
  return FieldError(absl::StatusCode::kAlreadyExists, "name",
                    absl::StrCat(target.string(), " is there and is no checkpoint of a ", kind));
}

}  // namespace

absl::Status CheckName(const std::string& name) {
  if (IsPlainName(name)) return absl::OkStatus();
  return InvalidField("name", "must be a plain file name that does not start with a dot");
}

absl::StatusOr<PendingCheckpoint> PendingCheckpoint::Begin(const std::string& parent,
                                                           const std::string& name,
                                                           const Identity& identity) {
  TANDEM_RETURN_IF_ERROR(CheckName(name));
  TANDEM_RETURN_IF_ERROR(CheckGiven("directory", parent));
  const fs::path target = fs::path(parent) / name;
  TANDEM_RETURN_IF_ERROR(RecoverDirectory(target.string()));
  TANDEM_RETURN_IF_ERROR(CheckReplaceable(target, identity.kind));
  absl::StatusOr<TemporaryDirectory> temporary = TemporaryDirectory::Create(parent, name);
  if (!temporary.ok()) return PrependFieldPath("directory", temporary.status());
  return PendingCheckpoint(target.string(), identity, *std::move(temporary));
}

absl::StatusOr<Saved> PendingCheckpoint::Commit() && {
  const TemporaryDirectory written = std::move(temporary_);
  TANDEM_ASSIGN_OR_RETURN(const int64_t bytes, WriteManifest(written.path(), identity_));
  TANDEM_RETURN_IF_ERROR(ReplaceDirectory(written.path(), target_));
  return Saved{.path = target_, .bytes = bytes};
}

absl::StatusOr<Saved> Save(
    const std::string& parent, const std::string& name, const Identity& identity,
    absl::FunctionRef<absl::Status(const std::string& directory)> write_files) {
  TANDEM_ASSIGN_OR_RETURN(PendingCheckpoint pending,
                          PendingCheckpoint::Begin(parent, name, identity));
  TANDEM_RETURN_IF_ERROR(write_files(pending.directory()));
  return std::move(pending).Commit();
}

absl::Status Verify(const std::string& path) {
  TANDEM_RETURN_IF_ERROR(RecoverDirectory(path));
  std::error_code error;
  if (!fs::is_directory(path, error)) {
    return absl::NotFoundError(absl::StrCat("no checkpoint directory ", path));
  }
  TANDEM_ASSIGN_OR_RETURN(const Manifest manifest, ReadManifest(path));
  std::set<std::string> listed = {kManifestFile};
  for (const FileEntry& expected : manifest.files) {
    const fs::path file = fs::path(path) / expected.name;
    const auto size = fs::file_size(file, error);
    if (error) return absl::DataLossError(absl::StrCat(file.string(), ": is missing"));
    if (static_cast<int64_t>(size) != expected.bytes) {
      return absl::DataLossError(absl::StrCat(file.string(), ": has ", size,
                                              " bytes, the manifest says ", expected.bytes));
    }
    TANDEM_ASSIGN_OR_RETURN(const FileEntry actual, Describe(file));
    if (actual.digest != expected.digest) {
      return absl::DataLossError(absl::StrCat(file.string(), ": has digest ", actual.digest,
                                              ", the manifest says ", expected.digest));
    }
    listed.insert(expected.name);
  }
  for (const fs::directory_entry& entry : fs::directory_iterator(path, error)) {
    if (!listed.contains(entry.path().filename().string())) {
      return absl::DataLossError(
          absl::StrCat(entry.path().string(), ": is not listed in the manifest"));
    }
  }
  return absl::OkStatus();
}

std::vector<Listed> List(const std::string& parent) {
  std::vector<Listed> listed;
  std::error_code error;
  for (const fs::directory_entry& entry : fs::directory_iterator(parent, error)) {
    if (!IsPlainName(entry.path().filename().string()) || entry.is_symlink(error)) continue;
    const absl::StatusOr<Manifest> manifest = ReadManifest(entry.path());
    if (manifest.ok()) listed.push_back({entry.path().string(), manifest->identity});
  }
  std::sort(listed.begin(), listed.end(), [](const Listed& a, const Listed& b) {
    return std::tie(a.identity.step, a.path) < std::tie(b.identity.step, b.path);
  });
  return listed;
}

absl::Status Prune(const std::string& parent, const std::string& kind, int64_t keep,
                   const std::string& just_saved) {
  TANDEM_RETURN_IF_ERROR(CheckAtLeast("keep", keep, 0));
  if (keep == 0) return absl::OkStatus();
  std::vector<std::string> others;
  for (const Listed& listed : List(parent)) {
    if (listed.path != just_saved && listed.identity.kind == kind) others.push_back(listed.path);
  }
  const auto kept = static_cast<size_t>(keep - 1);
  for (size_t i = 0; i + kept < others.size(); ++i) {
    TANDEM_RETURN_IF_ERROR(RemoveDirectory(others[i]));
  }
  return absl::OkStatus();
}

}  // namespace tandem::checkpoint
