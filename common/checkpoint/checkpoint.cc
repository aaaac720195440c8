#include "common/checkpoint/checkpoint.h"

#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "common/base/atomic_file.h"
#include "common/base/error.h"
#include "common/base/status_macros.h"
#include "common/tensor/checksum.h"

namespace tandem::checkpoint {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr char kFormat[] = "tandem-checkpoint";
constexpr int kFormatVersion = 1;

struct FileEntry {
  std::string name;
  int64_t bytes = 0;
  std::string digest;
};

bool IsPlainName(const std::string& name) {
  return !name.empty() && name[0] != '.' && name.size() <= 200 &&
         name.find('/') == std::string::npos && name.find('\0') == std::string::npos;
}

absl::Status FilesystemError(const char* what, const fs::path& path, const std::error_code& error) {
  return absl::Status(absl::ErrnoToStatusCode(error.value()),
                      absl::StrCat(what, " ", path.string(), ": ", error.message()));
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

// The entries of a manifest; DATA_LOSS for anything that is not exactly one.
absl::StatusOr<std::vector<FileEntry>> ReadManifest(const fs::path& directory) {
  const std::string path = (directory / kManifestFile).string();
  const auto broken = [&](absl::string_view why) {
    return absl::DataLossError(absl::StrCat(path, ": ", why));
  };
  const absl::StatusOr<std::string> text = ReadFile(path);
  if (!text.ok()) return broken("the manifest is missing: the checkpoint is not complete");
  const json manifest = json::parse(*text, nullptr, /*allow_exceptions=*/false);
  if (!manifest.is_object() || manifest.value("format", json()) != kFormat) {
    return broken("is not a manifest");
  }
  if (manifest.value("version", json()) != kFormatVersion) {
    return broken("is of a version that this build does not read");
  }
  const json files = manifest.value("files", json());
  if (!files.is_array()) return broken("lists no files");
  std::vector<FileEntry> entries;
  for (const json& file : files) {
    if (!file.is_object() || !file.value("name", json()).is_string() ||
        !file.value("bytes", json()).is_number_integer() ||
        !file.value("xxh3_128", json()).is_string()) {
      return broken("holds a broken entry");
    }
    entries.push_back({file["name"], file["bytes"], file["xxh3_128"]});
    if (!IsPlainName(entries.back().name)) return broken("names a file outside its directory");
  }
  return entries;
}

absl::StatusOr<int64_t> WriteManifest(const fs::path& directory) {
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
  const json manifest = {{"format", kFormat}, {"version", kFormatVersion}, {"files", files}};
  TANDEM_RETURN_IF_ERROR(
      WriteFileDurably((directory / kManifestFile).string(), manifest.dump(2) + "\n"));
  TANDEM_RETURN_IF_ERROR(SyncPath(directory.string()));
  return total;
}

// Puts `temporary` in the place of `target`, which may exist.
absl::Status Install(const fs::path& temporary, const fs::path& target) {
  if (!fs::exists(target)) return RenameDurably(temporary.string(), target.string());
  if (::renameat2(AT_FDCWD, temporary.c_str(), AT_FDCWD, target.c_str(), RENAME_EXCHANGE) != 0) {
    return FilesystemError("cannot replace", target,
                           std::error_code(errno, std::generic_category()));
  }
  std::error_code ignored;
  fs::remove_all(temporary, ignored);  // the old one; if this fails the next Save removes it
  return SyncPath(target.parent_path().string());
}

// "step_9" before "step_10".
bool NaturalLess(const std::string& a, const std::string& b) {
  size_t i = 0, j = 0;
  const auto digit = [](char c) { return std::isdigit(static_cast<unsigned char>(c)) != 0; };
  while (i < a.size() && j < b.size()) {
    if (digit(a[i]) && digit(b[j])) {
      size_t ai = i, bj = j;
      while (ai < a.size() && digit(a[ai])) ++ai;
      while (bj < b.size() && digit(b[bj])) ++bj;
      while (i < ai && a[i] == '0') ++i;
      while (j < bj && b[j] == '0') ++j;
      if (ai - i != bj - j) return ai - i < bj - j;
      const int order = a.compare(i, ai - i, b, j, bj - j);
      if (order != 0) return order < 0;
      i = ai;
      j = bj;
    } else {
      if (a[i] != b[j]) return a[i] < b[j];
      ++i;
      ++j;
    }
  }
  if ((a.size() - i) != (b.size() - j)) return a.size() - i < b.size() - j;
  return a < b;
}

}  // namespace

absl::StatusOr<Saved> Save(
    const std::string& parent, const std::string& name,
    absl::FunctionRef<absl::Status(const std::string& directory)> write_files) {
  if (!IsPlainName(name)) {
    return InvalidField("name", "must be a plain file name that does not start with a dot");
  }
  if (parent.empty()) return InvalidField("directory", "must not be empty");
  std::error_code error;
  fs::create_directories(parent, error);
  if (error) return FilesystemError("cannot create", parent, error);
  const std::string prefix = absl::StrCat(".tmp-", name, "-");
  for (const fs::directory_entry& entry : fs::directory_iterator(parent, error)) {
    const std::string found = entry.path().filename().string();
    if (found.compare(0, prefix.size(), prefix) == 0) fs::remove_all(entry.path(), error);
  }
  const fs::path temporary = fs::path(parent) / absl::StrCat(prefix, ::getpid());
  const fs::path target = fs::path(parent) / name;
  fs::create_directory(temporary, error);
  if (error) return FilesystemError("cannot create", temporary, error);

  Saved saved{.path = target.string()};
  absl::Status status = write_files(temporary.string());
  if (status.ok()) {
    absl::StatusOr<int64_t> bytes = WriteManifest(temporary);
    status = bytes.status();
    if (bytes.ok()) saved.bytes = *bytes;
  }
  if (status.ok()) status = Install(temporary, target);
  if (!status.ok()) {
    fs::remove_all(temporary, error);
    return status;
  }
  return saved;
}

absl::Status Verify(const std::string& path) {
  std::error_code error;
  if (!fs::is_directory(path, error)) {
    return absl::NotFoundError(absl::StrCat("no checkpoint directory ", path));
  }
  TANDEM_ASSIGN_OR_RETURN(const std::vector<FileEntry> entries, ReadManifest(path));
  std::set<std::string> listed = {kManifestFile};
  for (const FileEntry& expected : entries) {
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

std::vector<std::string> List(const std::string& parent) {
  std::vector<std::string> names;
  std::error_code error;
  for (const fs::directory_entry& entry : fs::directory_iterator(parent, error)) {
    const std::string name = entry.path().filename().string();
    if (IsPlainName(name) && fs::exists(entry.path() / kManifestFile, error)) {
      names.push_back(name);
    }
  }
  std::sort(names.begin(), names.end(), NaturalLess);
  std::vector<std::string> paths;
  for (const std::string& name : names) paths.push_back((fs::path(parent) / name).string());
  return paths;
}

absl::Status Prune(const std::string& parent, int64_t keep, const std::string& just_saved,
                   absl::FunctionRef<bool(const std::string& path)> is_ours) {
  if (keep < 0) return InvalidField("keep", "must not be negative");
  if (keep == 0) return absl::OkStatus();
  std::vector<std::string> others;
  for (std::string& path : List(parent)) {
    if (path != just_saved && is_ours(path)) others.push_back(std::move(path));
  }
  const auto kept = static_cast<size_t>(keep - 1);
  for (size_t i = 0; i + kept < others.size(); ++i) {
    // The manifest goes first: from then on the directory is no checkpoint.
    std::error_code error;
    fs::remove(fs::path(others[i]) / kManifestFile, error);
    if (!error) fs::remove_all(others[i], error);
    if (error) return FilesystemError("cannot remove", others[i], error);
  }
  return absl::OkStatus();
}

}  // namespace tandem::checkpoint
