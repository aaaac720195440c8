#include "common/checkpoint/manifest.h"

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>
#include <set>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "common/base/bounded_json.h"
#include "common/base/checksum.h"
#include "common/base/errors/error.h"
#include "common/base/errors/status_macros.h"
#include "common/base/files/atomic_file.h"
#include "common/base/files/file_descriptor.h"
#include "common/base/files/paths/confined_folder.h"

namespace tandem::checkpoint {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr char kFormat[] = "tandem-checkpoint";
// Programs that know version 2 alone would ignore what is in a folder, and write a next checkpoint
// without it: they must refuse a checkpoint that has one.
constexpr int kFormatVersion = 2, kFormatVersionWithFolders = 3;
constexpr size_t kMaxManifestBytes = 16 << 20;

// Whether `name` is a plain name, or one inside a folder with a plain name.
bool IsFileName(const std::string& name) {
  const size_t slash = name.find('/');
  if (slash == std::string::npos) return IsPlainName(name);
  return IsPlainName(name.substr(0, slash)) && IsPlainName(name.substr(slash + 1));
}

// Describes `directory`/`name`.
absl::StatusOr<Manifest::File> Describe(const fs::path& directory, const std::string& name) {
  const fs::path path = directory / name;
  Manifest::File entry{.name = name, .bytes = 0, .digest = {}};
  Checksum checksum;
  TANDEM_RETURN_IF_ERROR(ForEachChunk(path.string(), [&](absl::string_view chunk) {
    checksum.Update(chunk.data(), chunk.size());
    entry.bytes += static_cast<int64_t>(chunk.size());
    return absl::OkStatus();
  }));
  entry.digest = checksum.Hex();
  return entry;
}

// Returns the rank that reads each file: of the largest files first, the rank that has least.
std::vector<int> Readers(const Manifest& manifest, int ranks) {
  std::vector<size_t> order(manifest.files.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return manifest.files[a].bytes > manifest.files[b].bytes;
  });
  std::vector<int64_t> bytes(static_cast<size_t>(ranks));
  std::vector<int> readers(manifest.files.size());
  for (const size_t file : order) {
    const auto least = std::min_element(bytes.begin(), bytes.end());
    *least += manifest.files[file].bytes;
    readers[file] = static_cast<int>(least - bytes.begin());
  }
  return readers;
}

// Returns the name of a file or folder below `directory`, relative to it.
std::string NameIn(const fs::path& directory, const fs::path& path) {
  return path.lexically_relative(directory).generic_string();
}

// Returns a file, or folder, of `directory` that the manifest does not list.
std::optional<std::string> ForeignFile(const fs::path& directory, const Manifest& manifest) {
  std::set<std::string> listed = {kManifestFile};
  for (const Manifest::File& file : manifest.files) {
    listed.insert(file.name);
    listed.insert(fs::path(file.name).parent_path().string());  // its folder
  }
  std::error_code ignored;
  const fs::path there = SystemPath(directory.string());
  for (const fs::directory_entry& entry : fs::recursive_directory_iterator(there, ignored)) {
    const std::string name = NameIn(there, entry.path());
    if (!listed.contains(name)) return (directory / name).string();
  }
  return std::nullopt;
}

}  // namespace

bool IsPlainName(const std::string& name) {
  return !name.empty() && name[0] != '.' && name.size() <= 200 &&
         name.find('/') == std::string::npos && name.find('\0') == std::string::npos;
}

absl::StatusOr<Manifest> ReadManifest(const fs::path& directory) {
  const std::string path = (directory / kManifestFile).string();
  const auto broken = [&](absl::string_view why) {
    return absl::DataLossError(absl::StrCat(path, ": ", why));
  };
  const absl::StatusOr<std::string> text = ReadFile(path, kMaxManifestBytes);
  if (absl::IsNotFound(text.status())) {
    return broken("the manifest is missing: the checkpoint is not complete");
  }
  if (!text.ok()) return absl::DataLossError(text.status().message());
  const absl::StatusOr<json> parsed = ParseBoundedJson(*text, path);
  if (!parsed.ok()) return absl::DataLossError(parsed.status().message());
  const json& document = *parsed;
  if (!document.is_object() || document.value("format", json()) != kFormat) {
    return broken("is not a manifest");
  }
  const json version = document.value("version", json());
  if (version != kFormatVersion && version != kFormatVersionWithFolders) {
    return broken("has a version that this build does not support");
  }
  if (!document.value("kind", json()).is_string() ||
      !document.value("step", json()).is_number_integer()) {
    return broken("does not name the kind of its checkpoint");
  }
  for (const char* text_field : {"name", "run_id"}) {
    if (!document.value(text_field, json("")).is_string()) {
      return broken("does not name the kind of its checkpoint");
    }
  }
  Manifest manifest{.name = document.value("name", ""),
                    .identity = {.kind = document["kind"],
                                 .step = document["step"],
                                 .run_id = document.value("run_id", "")},
                    .files = {}};
  const json files = document.value("files", json());
  if (!files.is_array()) return broken("lists no files");
  for (const json& file : files) {
    if (!file.is_object() || !file.value("name", json()).is_string() ||
        !file.value("bytes", json()).is_number_integer() ||
        !file.value("xxh3_128", json()).is_string()) {
      return broken("holds a broken entry");
    }
    manifest.files.push_back({file["name"], file["bytes"], file["xxh3_128"]});
    if (!IsFileName(manifest.files.back().name)) {
      return broken("names a file outside its directory");
    }
  }
  return manifest;
}

absl::StatusOr<int64_t> WriteManifest(const fs::path& directory, const std::string& name,
                                      const Identity& identity,
                                      const std::vector<WrittenFile>& written) {
  std::map<std::string, const WrittenFile*> by_name;
  for (const WrittenFile& file : written) {
    const std::string name_in = NameIn(directory, file.path);
    if (!name_in.starts_with("../")) by_name[name_in] = &file;  // else it is another folder's
  }
  std::set<std::string> missing;
  for (const auto& [file, unused] : by_name) missing.insert(file);
  const fs::path there = SystemPath(directory.string());
  for (const fs::directory_entry& entry : fs::recursive_directory_iterator(there)) {
    const std::string entry_name = NameIn(there, entry.path());
    const std::string shown = (directory / entry_name).string();
    const fs::file_status status = entry.symlink_status();
    const bool is_folder = fs::is_directory(status) && IsPlainName(entry_name);
    if (is_folder && !fs::is_empty(entry.path())) {
      TANDEM_RETURN_IF_ERROR(SyncPath(shown));
    } else if (!fs::is_regular_file(status) || !IsFileName(entry_name)) {
      return absl::InternalError(
          absl::StrCat(shown, " is neither a plain file nor a folder of plain files"));
    } else if (!by_name.contains(entry_name)) {
      return absl::InternalError(
          absl::StrCat(shown, " does not belong to any rank: another process put it there"));
    } else if (static_cast<int64_t>(entry.file_size()) == by_name[entry_name]->bytes) {
      missing.erase(entry_name);
    }
  }
  if (!missing.empty()) {
    return absl::DataLossError(
        absl::StrCat((directory / *missing.begin()).string(),
                     " is missing or incomplete, although a rank has written it: all ranks must ",
                     "see the same directory"));
  }
  json files = json::array();
  int64_t total = 0;
  bool has_folders = false;
  for (const auto& [file, entry] : by_name) {
    files.push_back({{"name", file}, {"bytes", entry->bytes}, {"xxh3_128", entry->digest}});
    total += entry->bytes;
    has_folders = has_folders || file.find('/') != std::string::npos;
  }
  const json manifest = {{"format", kFormat},
                         {"version", has_folders ? kFormatVersionWithFolders : kFormatVersion},
                         {"name", name},
                         {"kind", identity.kind},
                         {"step", identity.step},
                         {"run_id", identity.run_id},
                         {"files", files}};
  TANDEM_RETURN_IF_ERROR(WriteFileDurably(
      (directory / kManifestFile).string(),
      manifest.dump(2, ' ', /*ensure_ascii=*/false, json::error_handler_t::replace) + "\n"));
  TANDEM_RETURN_IF_ERROR(SyncPath(directory.string()));
  return total;
}

absl::Status VerifyFiles(const fs::path& directory, const Manifest& manifest, int rank, int ranks) {
  const std::vector<int> readers = Readers(manifest, ranks);
  for (size_t i = 0; i < manifest.files.size(); ++i) {
    const Manifest::File& expected = manifest.files[i];
    const fs::path file = directory / expected.name;
    const auto lost = [&](absl::string_view why) {
      return absl::DataLossError(absl::StrCat(file.string(), ": ", why));
    };
    const absl::StatusOr<FileDescriptor> opened = FileDescriptor::OpenRegular(file.string());
    if (absl::IsNotFound(opened.status())) return lost("is missing");
    if (!opened.ok()) return absl::DataLossError(opened.status().message());
    TANDEM_ASSIGN_OR_RETURN(const int64_t size, opened->Size());
    if (size != expected.bytes) {
      return lost(absl::StrCat("has ", size, " bytes, the manifest says ", expected.bytes));
    }
    if (readers[i] != rank) continue;
    TANDEM_ASSIGN_OR_RETURN(const Manifest::File actual, Describe(directory, expected.name));
    if (actual.digest != expected.digest) {
      return absl::DataLossError(absl::StrCat(file.string(), ": has digest ", actual.digest,
                                              ", the manifest says ", expected.digest));
    }
  }
  if (const auto foreign = ForeignFile(directory, manifest)) {
    return absl::DataLossError(absl::StrCat(*foreign, ": is not listed in the manifest"));
  }
  return absl::OkStatus();
}

absl::Status CheckOwned(const fs::path& directory, const std::string& name) {
  const auto refuse = [&](absl::StatusCode code, absl::string_view why) {
    return FieldError(code, "name", absl::StrCat(directory.string(), " exists and ", why));
  };
  std::error_code ignored;
  const absl::StatusOr<Manifest> manifest = ReadManifest(directory);
  if (fs::is_symlink(SystemPath(directory.string()), ignored) || !manifest.ok()) {
    return refuse(absl::StatusCode::kAlreadyExists, "is not a checkpoint");
  }
  if (manifest->name != name || name.empty()) {
    return refuse(
        absl::StatusCode::kAlreadyExists,
        absl::StrCat("is a copy: its manifest names the checkpoint '", manifest->name, "'"));
  }
  if (const auto foreign = ForeignFile(directory, *manifest)) {
    return FieldError(
        absl::StatusCode::kFailedPrecondition, "name",
        absl::StrCat(*foreign,
                     " does not belong to the checkpoint, which is therefore not removed"));
  }
  return absl::OkStatus();
}

}  // namespace tandem::checkpoint
