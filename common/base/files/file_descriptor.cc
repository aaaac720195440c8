#include "common/base/files/file_descriptor.h"

#include <fcntl.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "common/base/files/paths/confined_folder.h"
#include "common/base/progress.h"

namespace tandem {
namespace {

std::atomic<int64_t> bytes_read = 0, bytes_written = 0;

// 0: as fast as the disk is.
double SimulatedBytesPerSecond() {
  const char* const text = std::getenv("TANDEM_TEST_DISK_BYTES_PER_SECOND");
  return text == nullptr ? 0.0 : std::strtod(text, nullptr);
}

const char* KindOf(mode_t mode) {
  if (S_ISDIR(mode)) return "a folder";
  if (S_ISFIFO(mode)) return "a named pipe";
  if (S_ISSOCK(mode)) return "a socket";
  return "a device";
}

}  // namespace

void NoteTransfer(Transfer direction, size_t bytes) {
  (direction == Transfer::kRead ? bytes_read : bytes_written) += static_cast<int64_t>(bytes);
  if (const double rate = SimulatedBytesPerSecond(); rate > 0) {
    absl::SleepFor(absl::Seconds(static_cast<double>(bytes) / rate));
  }
  NoteProgress();
}

FileTraffic TotalFileTraffic() { return {.read = bytes_read, .written = bytes_written}; }

absl::Status FileError(int error, absl::string_view what, absl::string_view path) {
  if (error == ELOOP) {
    return absl::FailedPreconditionError(absl::StrCat(
        what, " ", path, ": the path contains a symbolic link, which is not followed here"));
  }
  const absl::StatusCode code = error == ENOSPC || error == EDQUOT
                                    ? absl::StatusCode::kResourceExhausted
                                    : absl::ErrnoToStatusCode(error);
  return absl::Status(code, absl::StrCat(what, " ", path, ": ", std::strerror(error)));
}

absl::StatusOr<FileDescriptor> FileDescriptor::Open(const std::string& path, int flags) {
  const int fd = OpenConfined(path, flags);
  if (fd < 0) {
    return FileError(-fd, (flags & O_CREAT) != 0 ? "cannot create" : "cannot open", path);
  }
  return FileDescriptor(fd, path);
}

absl::StatusOr<FileDescriptor> FileDescriptor::OpenRegular(const std::string& path) {
  // A named pipe without a writer would block, a terminal would become this process's.
  const int fd = OpenConfined(path, O_RDONLY | O_NONBLOCK | O_NOCTTY);
  if (fd == -ENXIO) return absl::InvalidArgumentError(absl::StrCat(path, ": not a regular file"));
  if (fd < 0) return FileError(-fd, "cannot open", path);
  FileDescriptor file(fd, path);
  struct stat info = {};
  if (::fstat(fd, &info) != 0) return FileError(errno, "cannot stat", path);
  if (S_ISREG(info.st_mode)) return file;
  return absl::InvalidArgumentError(
      absl::StrCat(path, ": not a regular file, but ", KindOf(info.st_mode)));
}

absl::StatusOr<int64_t> FileDescriptor::Size() const {
  struct stat info = {};
  if (::fstat(fd_, &info) != 0) return FileError(errno, "cannot stat", path_);
  return info.st_size;
}

absl::StatusOr<FileDescriptor> FileDescriptor::CreateUnnamed(const std::string& directory) {
  std::string path = absl::StrCat(directory, "/tandem-XXXXXX");
  const int fd = ::mkostemp(path.data(), O_CLOEXEC);
  if (fd < 0) return FileError(errno, "cannot create a file in", directory);
  ::unlink(path.c_str());
  return FileDescriptor(fd, std::move(path));
}

FileDescriptor::FileDescriptor(FileDescriptor&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)), path_(std::move(other.path_)) {}

FileDescriptor::~FileDescriptor() {
  if (fd_ >= 0) ::close(fd_);
}

absl::Status FileDescriptor::WriteAll(absl::string_view bytes) const {
  while (!bytes.empty()) {
    const ssize_t written = ::write(fd_, bytes.data(), std::min(bytes.size(), kTransferBytes));
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return FileError(errno, "cannot write", path_);
    NoteTransfer(Transfer::kWrite, static_cast<size_t>(written));
    bytes.remove_prefix(static_cast<size_t>(written));
  }
  return absl::OkStatus();
}

absl::StatusOr<size_t> FileDescriptor::Read(char* buffer, size_t capacity) const {
  while (true) {
    const ssize_t count = ::read(fd_, buffer, std::min(capacity, kTransferBytes));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return FileError(errno, "cannot read", path_);
    NoteTransfer(Transfer::kRead, static_cast<size_t>(count));
    return static_cast<size_t>(count);
  }
}

absl::Status FileDescriptor::Sync() const {
  if (::fsync(fd_) != 0) return FileError(errno, "cannot sync", path_);
  return absl::OkStatus();
}

absl::Status FileDescriptor::WriteAllAt(int64_t offset, absl::Span<const std::byte> bytes) const {
  while (!bytes.empty()) {
    const size_t size = std::min(bytes.size(), kTransferBytes);
    const ssize_t written = ::pwrite(fd_, bytes.data(), size, offset);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return FileError(errno, "cannot write", path_);
    NoteTransfer(Transfer::kWrite, static_cast<size_t>(written));
    bytes.remove_prefix(static_cast<size_t>(written));
    offset += written;
  }
  return absl::OkStatus();
}

absl::Status FileDescriptor::ReadAllAt(int64_t offset, absl::Span<std::byte> out) const {
  while (!out.empty()) {
    const ssize_t count = ::pread(fd_, out.data(), std::min(out.size(), kTransferBytes), offset);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return FileError(errno, "cannot read", path_);
    if (count == 0) return absl::DataLossError(absl::StrCat(path_, ": ends at byte ", offset));
    NoteTransfer(Transfer::kRead, static_cast<size_t>(count));
    out.remove_prefix(static_cast<size_t>(count));
    offset += count;
  }
  return absl::OkStatus();
}

absl::Status FileDescriptor::Reserve(int64_t bytes) const {
  if (bytes == 0) return absl::OkStatus();
  const auto refused = [&](int error) {
    return FileError(error, absl::StrCat("cannot reserve ", bytes, " bytes for"), path_);
  };
  // An allocation that fails takes all that there is for a moment, also from other processes.
  struct statvfs system = {};
  if (::fstatvfs(fd_, &system) == 0 &&
      static_cast<uint64_t>(bytes) > uint64_t{system.f_bavail} * system.f_frsize) {
    return refused(ENOSPC);
  }
  int result = 0;
  do {
    result = ::fallocate(fd_, 0, 0, bytes);
  } while (result != 0 && errno == EINTR);
  if (result == 0 || errno == EOPNOTSUPP || errno == ENOSYS) return absl::OkStatus();
  return refused(errno);
}

}  // namespace tandem
