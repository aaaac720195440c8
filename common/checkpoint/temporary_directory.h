// Directories under construction, beside what they are to become.
//
// A process that is killed leaves them behind. Whoever fills or removes one therefore holds a lock
// on it (flock(2)), which ends with the process: one that nobody holds is left over, and is removed
// when the next one is created in the same parent. Where directories cannot be locked (NFS) nothing
// is left to guess, and nothing is removed.
#ifndef TANDEM_COMMON_CHECKPOINT_TEMPORARY_DIRECTORY_H_
#define TANDEM_COMMON_CHECKPOINT_TEMPORARY_DIRECTORY_H_

#include <optional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/base/file_descriptor.h"

namespace tandem::checkpoint {

// Holds a directory, whatever it is renamed to, as long as the result lives. Nothing if somebody
// else holds it, if it cannot be locked, or is none.
std::optional<FileDescriptor> LockDirectory(const std::string& path);

class TemporaryDirectory {
 public:
  // A new, empty directory ".tandem-tmp-…-<name>" in `parent`, which is created too if need be.
  // What dead writers left in `parent` is removed first. Errors name the path.
  static absl::StatusOr<TemporaryDirectory> Create(const std::string& parent,
                                                   const std::string& name);
  TemporaryDirectory(TemporaryDirectory&& other) noexcept
      : path_(std::exchange(other.path_, {})), lock_(std::move(other.lock_)) {}
  TemporaryDirectory& operator=(TemporaryDirectory&&) = delete;
  // Removes it, unless it has been renamed.
  ~TemporaryDirectory();

  const std::string& path() const { return path_; }

 private:
  TemporaryDirectory(std::string path, std::optional<FileDescriptor> lock)
      : path_(std::move(path)), lock_(std::move(lock)) {}

  std::string path_;
  std::optional<FileDescriptor> lock_;  // none where directories cannot be locked
};

// Removes a directory under a temporary name, so that `path` is whole or not there at all. OK when
// somebody else has removed it.
absl::Status RemoveDirectory(const std::string& path);

}  // namespace tandem::checkpoint

#endif  // TANDEM_COMMON_CHECKPOINT_TEMPORARY_DIRECTORY_H_
