// An open file, and what is done with one.
#ifndef TANDEM_COMMON_BASE_FILES_FILE_DESCRIPTOR_H_
#define TANDEM_COMMON_BASE_FILES_FILE_DESCRIPTOR_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace tandem {

// "<what> <path>: <the system's words>" for an errno. A full disk is RESOURCE_EXHAUSTED, a missing
// file NOT_FOUND, a forbidden one PERMISSION_DENIED, a link where none may be (ConfinedFolder)
// FAILED_PRECONDITION.
absl::Status FileError(int error, absl::string_view what, absl::string_view path);

// The most bytes that one call moves between a file and memory, and with which a file is mapped and
// read: each is progress that health sees, on the slowest of disks.
inline constexpr size_t kTransferBytes = size_t{1} << 20;

enum class Transfer { kRead, kWrite };
// Notes a transfer of at most kTransferBytes between a file and memory as progress (progress.h).
// FileDescriptor does it itself; whoever reads a mapped file calls it. In tests it takes the time
// of a slow disk, of $TANDEM_TEST_DISK_BYTES_PER_SECOND.
void NoteTransfer(Transfer direction, size_t bytes);

// The bytes that this process has transferred in each direction. Thread-safe.
struct FileTraffic {
  int64_t read = 0, written = 0;
};
FileTraffic TotalFileTraffic();

// Closes itself.
class FileDescriptor {
 public:
  // `flags` of open(2); close-on-exec is added. A new file gets mode 0644. Beneath a ConfinedFolder
  // of this thread no link is followed.
  static absl::StatusOr<FileDescriptor> Open(const std::string& path, int flags);
  // Opens a regular file for reading. Whatever else has the path (a named pipe, a device, a folder)
  // is INVALID_ARGUMENT at once: to open or read it could block for ever, or never end.
  static absl::StatusOr<FileDescriptor> OpenRegular(const std::string& path);
  // A new file in `directory` that is to be written and read and has no name: it goes when it is
  // closed, however the process ends.
  static absl::StatusOr<FileDescriptor> CreateUnnamed(const std::string& directory);

  FileDescriptor(FileDescriptor&& other) noexcept;
  FileDescriptor& operator=(FileDescriptor&&) = delete;
  ~FileDescriptor();

  int get() const { return fd_; }
  const std::string& path() const { return path_; }

  // Bytes of the file now.
  absl::StatusOr<int64_t> Size() const;

  absl::Status WriteAll(absl::string_view bytes) const;
  // At most `capacity` bytes into `buffer`; 0 at the end of the file.
  absl::StatusOr<size_t> Read(char* buffer, size_t capacity) const;
  absl::Status Sync() const;

  // At a place of the file, wherever Read and WriteAll are. A file that ends before all of `out` is
  // read is DATA_LOSS.
  absl::Status WriteAllAt(int64_t offset, absl::Span<const std::byte> bytes) const;
  absl::Status ReadAllAt(int64_t offset, absl::Span<std::byte> out) const;
  // Takes the space of the file's first `bytes` bytes, so that no write to them finds the disk
  // full. Does nothing where the file system cannot.
  absl::Status Reserve(int64_t bytes) const;

 private:
  FileDescriptor(int fd, std::string path) : fd_(fd), path_(std::move(path)) {}

  int fd_;
  std::string path_;
};

}  // namespace tandem

#endif  // TANDEM_COMMON_BASE_FILES_FILE_DESCRIPTOR_H_
