#include "common/base/file_descriptor.h"

#include <fcntl.h>
#include <stdlib.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"

namespace tandem {
namespace {

// The system takes at most 2 GiB in one call.
constexpr size_t kMaxCallBytes = size_t{1} << 30;

}  // namespace

absl::Status FileError(int error, absl::string_view what, absl::string_view path) {
  const absl::StatusCode code = error == ENOSPC || error == EDQUOT
                                    ? absl::StatusCode::kResourceExhausted
                                    : absl::ErrnoToStatusCode(error);
  return absl::Status(code, absl::StrCat(what, " ", path, ": ", std::strerror(error)));
}

absl::StatusOr<FileDescriptor> FileDescriptor::Open(const std::string& path, int flags) {
  const int fd = ::open(path.c_str(), flags | O_CLOEXEC, 0644);
  if (fd < 0) {
    return FileError(errno, (flags & O_CREAT) != 0 ? "cannot create" : "cannot open", path);
  }
  return FileDescriptor(fd, path);
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
    const ssize_t written = ::write(fd_, bytes.data(), std::min(bytes.size(), kMaxCallBytes));
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return FileError(errno, "cannot write", path_);
    bytes.remove_prefix(static_cast<size_t>(written));
  }
  return absl::OkStatus();
}

absl::StatusOr<size_t> FileDescriptor::Read(char* buffer, size_t capacity) const {
  while (true) {
    const ssize_t count = ::read(fd_, buffer, capacity);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return FileError(errno, "cannot read", path_);
    return static_cast<size_t>(count);
  }
}

absl::Status FileDescriptor::Sync() const {
  if (::fsync(fd_) != 0) return FileError(errno, "cannot sync", path_);
  return absl::OkStatus();
}

absl::Status FileDescriptor::WriteAllAt(int64_t offset, absl::Span<const std::byte> bytes) const {
  while (!bytes.empty()) {
    const size_t size = std::min(bytes.size(), kMaxCallBytes);
    const ssize_t written = ::pwrite(fd_, bytes.data(), size, offset);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return FileError(errno, "cannot write", path_);
    bytes.remove_prefix(static_cast<size_t>(written));
    offset += written;
  }
  return absl::OkStatus();
}

absl::Status FileDescriptor::ReadAllAt(int64_t offset, absl::Span<std::byte> out) const {
  while (!out.empty()) {
    const ssize_t count = ::pread(fd_, out.data(), std::min(out.size(), kMaxCallBytes), offset);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return FileError(errno, "cannot read", path_);
    if (count == 0) return absl::DataLossError(absl::StrCat(path_, ": ends at byte ", offset));
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
