// A file without a name that another process of this machine reads while it is open here.
#ifndef TANDEM_COMMON_BASE_FILES_SHARED_FILE_H_
#define TANDEM_COMMON_BASE_FILES_SHARED_FILE_H_

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "common/base/files/file_descriptor.h"
#include "common/base/files/shared_bytes.h"

namespace tandem {

// Where an open file is: /proc/<process>/fd/<descriptor>. Device and inode tell a reader whether it
// found that file; in another machine or another namespace of processes the path is one of its own.
struct SharedFile {
  int64_t process = 0;
  int32_t descriptor = -1;
  uint64_t device = 0, inode = 0;
};

// Describes a file of this process, for as long as it stays open. Errors of fstat(2).
absl::StatusOr<SharedFile> Share(const FileDescriptor& file);

// Opens a file of another process for reading. Only a regular file that has no name
// (FileDescriptor::CreateUnnamed) is opened, so that nobody is made to read a file of somebody's.
// NOT_FOUND if this process sees no such file, PERMISSION_DENIED if it may not open it,
// FAILED_PRECONDITION if it found another file, or one with a name.
absl::StatusOr<std::shared_ptr<const SharedBytes>> OpenShared(const SharedFile& shared);

}  // namespace tandem

#endif  // TANDEM_COMMON_BASE_FILES_SHARED_FILE_H_
