#include "common/checkpoint/replace_directory.h"

#include <fcntl.h>
#include <stdio.h>

#include <cerrno>
#include <filesystem>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "common/base/errors/status_macros.h"
#include "common/base/files/atomic_file.h"
#include "common/base/files/file_descriptor.h"
#include "common/base/files/paths/confined_folder.h"
#include "common/checkpoint/manifest.h"
#include "common/checkpoint/temporary_directory.h"

namespace tandem::checkpoint {
namespace {

namespace fs = std::filesystem;

std::string AsidePath(const fs::path& path) {
  return (path.parent_path() / absl::StrCat(".tandem-old-", path.filename().string())).string();
}

absl::Status Remove(const std::string& path) {
  std::error_code error;
  fs::remove_all(SystemPath(path), error);
  return error ? FileError(error.value(), "cannot remove", path) : absl::OkStatus();
}

bool CannotExchange(int error) { return error == EINVAL || error == ENOSYS || error == EOPNOTSUPP; }

absl::Status ReplaceInTwoSteps(const std::string& from, const std::string& to) {
  const std::string aside = AsidePath(to);
  TANDEM_RETURN_IF_ERROR(RecoverDirectory(to));
  std::error_code ignored;
  if (fs::exists(fs::symlink_status(SystemPath(aside), ignored))) {
    return absl::AlreadyExistsError(
        absl::StrCat(aside, " is in the way: the replaced checkpoint would be moved there"));
  }
  TANDEM_RETURN_IF_ERROR(RenameDurably(to, aside));
  if (absl::Status moved = RenameDurably(from, to); !moved.ok()) {
    RenameDurably(aside, to).IgnoreError();  // RecoverDirectory tries again
    return moved;
  }
  return Remove(aside);
}

}  // namespace

int ExchangePathsBySystemCall(const std::string& a, const std::string& b) {
  const int result = ::renameat2(AT_FDCWD, SystemPath(a).c_str(), AT_FDCWD, SystemPath(b).c_str(),
                                 RENAME_EXCHANGE);
  return result == 0 ? 0 : errno;
}

absl::Status ReplaceDirectory(const std::string& from, const std::string& to,
                              const ExchangePaths& exchange) {
  std::error_code ignored;
  if (!fs::exists(SystemPath(to), ignored)) return RenameDurably(from, to);
  // After the exchange the old directory has a temporary name, which others remove unless locked.
  const auto held = LockDirectory(to);
  const int error = exchange(from, to);
  if (CannotExchange(error)) return ReplaceInTwoSteps(from, to);
  if (error != 0) return FileError(error, "cannot replace", to);
  TANDEM_RETURN_IF_ERROR(SyncPath(fs::path(to).parent_path().string()));
  return Remove(from);  // the old directory
}

absl::Status RecoverDirectory(const std::string& path) {
  const fs::path target =
      fs::path(path).has_filename() ? fs::path(path) : fs::path(path).parent_path();
  const std::string aside = AsidePath(target);
  if (!CheckOwned(aside, target.filename().string()).ok()) return absl::OkStatus();
  std::error_code ignored;
  return fs::exists(SystemPath(target.string()), ignored) ? Remove(aside)
                                                          : RenameDurably(aside, target.string());
}

}  // namespace tandem::checkpoint
