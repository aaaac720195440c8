// Directories under construction, which are renamed when they are complete.
//
// A process that is killed leaves its temporary directory behind. Whoever fills or removes one
// therefore holds a lock on it (flock(2)), which ends with the process: a temporary directory
// without a lock is a leftover, and is removed when the next one is created in the same parent.
// Where directories cannot be locked (NFS), leftovers cannot be told apart and stay.
#ifndef TANDEM_COMMON_CHECKPOINT_TEMPORARY_DIRECTORY_H_
#define TANDEM_COMMON_CHECKPOINT_TEMPORARY_DIRECTORY_H_

#include <optional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/base/files/file_descriptor.h"

namespace tandem::checkpoint {

// Locks a directory for as long as the result lives, whatever the directory is renamed to. Returns
// nothing if it is locked already, cannot be locked, or is no directory.
std::optional<FileDescriptor> LockDirectory(const std::string& path);

class TemporaryDirectory {
 public:
  // Creates an empty directory ".tandem-tmp-<process>-<attempt>-<name>" in `parent`, and `parent`
  // too if need be. Removes the leftovers of dead writers in `parent` first. Errors name the path.
  static absl::StatusOr<TemporaryDirectory> Create(const std::string& parent,
                                                   const std::string& name);
  TemporaryDirectory(TemporaryDirectory&& other) noexcept
      : path_(std::exchange(other.path_, {})), lock_(std::move(other.lock_)) {}
  TemporaryDirectory& operator=(TemporaryDirectory&&) = delete;
  // Removes the directory, unless it has been renamed.
  ~TemporaryDirectory();

  const std::string& path() const { return path_; }

 private:
  TemporaryDirectory(std::string path, std::optional<FileDescriptor> lock)
      : path_(std::move(path)), lock_(std::move(lock)) {}

  std::string path_;
  std::optional<FileDescriptor> lock_;  // nothing where directories cannot be locked
};

// Removes a directory under a temporary name, so that `path` is complete or absent at any moment.
// OK if it is gone already.
absl::Status RemoveDirectory(const std::string& path);

}  // namespace tandem::checkpoint

#endif  // TANDEM_COMMON_CHECKPOINT_TEMPORARY_DIRECTORY_H_
