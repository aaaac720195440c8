#include "common/checkpoint/temporary_directory.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <system_error>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "common/base/errors/status_macros.h"
#include "common/base/files/paths/confined_folder.h"

namespace tandem::checkpoint {
namespace {

namespace fs = std::filesystem;

// Temporary names begin with this, a process id and a number.
constexpr char kPrefix[] = ".tandem-tmp-";
// Length of the part of <name> that is in a temporary name, which must be a valid file name.
constexpr size_t kMaxShownBytes = 100;

std::optional<FileDescriptor> Lock(const std::string& path, int operation) {
  absl::StatusOr<FileDescriptor> directory =
      FileDescriptor::Open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW);
  if (!directory.ok()) return std::nullopt;
  int result = 0;
  do {
    result = ::flock(directory->get(), operation);
  } while (result != 0 && errno == EINTR);
  if (result != 0) return std::nullopt;
  return *std::move(directory);
}

// Whether the locked directory is still at this path.
bool IsAt(const FileDescriptor& lock, const std::string& path) {
  struct stat held = {}, there = {};
  return ::fstat(lock.get(), &held) == 0 && ::lstat(SystemPath(path).c_str(), &there) == 0 &&
         held.st_dev == there.st_dev && held.st_ino == there.st_ino;
}

// Whether Create makes such a name: ".tandem-tmp-<process>-<attempt>-<name>".
bool IsTemporaryName(absl::string_view name) {
  if (!absl::ConsumePrefix(&name, kPrefix)) return false;
  for (int number = 0; number < 2; ++number) {
    const size_t digits = std::min(name.find_first_not_of("0123456789"), name.size());
    name.remove_prefix(digits);
    if (digits == 0 || !absl::ConsumePrefix(&name, "-")) return false;
  }
  return true;
}

void RemoveLeftovers(const fs::path& parent) {
  std::error_code ignored;
  std::vector<std::string> found;
  for (const fs::directory_entry& entry :
       fs::directory_iterator(SystemPath(parent.string()), ignored)) {
    const fs::path name = entry.path().filename();
    if (IsTemporaryName(name.string())) found.push_back((parent / name).string());
  }
  for (const std::string& path : found) {
    // Between opening and locking, another directory may have taken this path.
    const auto lock = LockDirectory(path);
    if (lock.has_value() && IsAt(*lock, path)) fs::remove_all(SystemPath(path), ignored);
  }
}

}  // namespace

std::optional<FileDescriptor> LockDirectory(const std::string& path) {
  return Lock(path, LOCK_EX | LOCK_NB);
}

absl::StatusOr<TemporaryDirectory> TemporaryDirectory::Create(const std::string& parent,
                                                              const std::string& name) {
  std::error_code error;
  fs::create_directories(SystemPath(parent), error);
  if (error) return FileError(error.value(), "cannot create", parent);
  RemoveLeftovers(parent);
  for (int attempt = 0;; ++attempt) {
    std::string path = (fs::path(parent) / absl::StrCat(kPrefix, ::getpid(), "-", attempt, "-",
                                                        name.substr(0, kMaxShownBytes)))
                           .string();
    const bool created = fs::create_directory(SystemPath(path), error);
    if (error) return FileError(error.value(), "cannot create", path);
    if (!created) continue;
    // Another process may have taken it for a leftover before it was locked: waits until that has
    // removed it, and tries again.
    std::optional<FileDescriptor> lock = Lock(path, LOCK_EX);
    if (lock.has_value() ? !IsAt(*lock, path) : !fs::exists(SystemPath(path), error)) continue;
    return TemporaryDirectory(std::move(path), std::move(lock));
  }
}

TemporaryDirectory::~TemporaryDirectory() {
  if (path_.empty() || (lock_.has_value() && !IsAt(*lock_, path_))) return;
  std::error_code ignored;
  fs::remove_all(SystemPath(path_), ignored);
}

absl::Status RemoveDirectory(const std::string& path) {
  const auto lock = LockDirectory(path);
  TANDEM_ASSIGN_OR_RETURN(const TemporaryDirectory temporary,
                          TemporaryDirectory::Create(fs::path(path).parent_path().string(),
                                                     fs::path(path).filename().string()));
  std::error_code error;
  // Replaces the empty directory.
  fs::rename(SystemPath(path), SystemPath(temporary.path()), error);
  if (error == std::errc::no_such_file_or_directory) return absl::OkStatus();
  if (!error) fs::remove_all(SystemPath(temporary.path()), error);
  return error ? FileError(error.value(), "cannot remove", path) : absl::OkStatus();
}

}  // namespace tandem::checkpoint
