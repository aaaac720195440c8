#include "common/base/atomic_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>

#include "absl/strings/str_cat.h"
#include "common/base/status_macros.h"

namespace tandem {
namespace {

absl::Status FileError(int error, absl::string_view what, absl::string_view path) {
  const absl::StatusCode code = error == ENOSPC || error == EDQUOT
                                    ? absl::StatusCode::kResourceExhausted
                                    : absl::ErrnoToStatusCode(error);
  return absl::Status(code, absl::StrCat(what, " ", path, ": ", std::strerror(error)));
}

// A file descriptor that closes itself.
class Descriptor {
 public:
  Descriptor(const std::string& path, int flags)
      : fd_(::open(path.c_str(), flags | O_CLOEXEC, 0644)) {}
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  bool valid() const { return fd_ >= 0; }
  int get() const { return fd_; }

 private:
  int fd_;
};

absl::Status WriteAll(int fd, absl::string_view bytes, const std::string& path) {
  while (!bytes.empty()) {
    const ssize_t written = ::write(fd, bytes.data(), bytes.size());
    if (written < 0) {
      if (errno == EINTR) continue;
      return FileError(errno, "cannot write", path);
    }
    bytes.remove_prefix(static_cast<size_t>(written));
  }
  return absl::OkStatus();
}

std::string ParentOf(const std::string& path) {
  const std::string parent = std::filesystem::path(path).parent_path().string();
  return parent.empty() ? "." : parent;
}

}  // namespace

absl::Status SyncPath(const std::string& path) {
  const Descriptor file(path, O_RDONLY);
  if (!file.valid()) return FileError(errno, "cannot open", path);
  if (::fsync(file.get()) != 0) return FileError(errno, "cannot sync", path);
  return absl::OkStatus();
}

absl::Status WriteFileDurably(const std::string& path, absl::string_view contents) {
  const Descriptor file(path, O_WRONLY | O_CREAT | O_TRUNC);
  if (!file.valid()) return FileError(errno, "cannot create", path);
  TANDEM_RETURN_IF_ERROR(WriteAll(file.get(), contents, path));
  if (::fsync(file.get()) != 0) return FileError(errno, "cannot sync", path);
  return absl::OkStatus();
}

absl::Status RenameDurably(const std::string& from, const std::string& to) {
  if (::rename(from.c_str(), to.c_str()) != 0) return FileError(errno, "cannot rename to", to);
  return SyncPath(ParentOf(to));
}

absl::Status WriteFileAtomically(const std::string& path, absl::string_view contents) {
  const std::string temporary = absl::StrCat(path, ".tmp.", ::getpid());
  absl::Status status = WriteFileDurably(temporary, contents);
  if (status.ok()) status = RenameDurably(temporary, path);
  if (!status.ok()) ::unlink(temporary.c_str());
  return status;
}

absl::StatusOr<std::string> ReadFile(const std::string& path) {
  const Descriptor file(path, O_RDONLY);
  if (!file.valid()) return FileError(errno, "cannot open", path);
  std::string contents;
  char buffer[1 << 16];
  while (true) {
    const ssize_t count = ::read(file.get(), buffer, sizeof(buffer));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return FileError(errno, "cannot read", path);
    if (count == 0) return contents;
    contents.append(buffer, static_cast<size_t>(count));
  }
}

absl::Status CopyFileDurably(const std::string& from, const std::string& to) {
  const Descriptor source(from, O_RDONLY);
  if (!source.valid()) return FileError(errno, "cannot open", from);
  const Descriptor target(to, O_WRONLY | O_CREAT | O_TRUNC);
  if (!target.valid()) return FileError(errno, "cannot create", to);
  char buffer[1 << 16];
  while (true) {
    const ssize_t count = ::read(source.get(), buffer, sizeof(buffer));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return FileError(errno, "cannot read", from);
    if (count == 0) break;
    TANDEM_RETURN_IF_ERROR(
        WriteAll(target.get(), absl::string_view(buffer, static_cast<size_t>(count)), to));
  }
  if (::fsync(target.get()) != 0) return FileError(errno, "cannot sync", to);
  return absl::OkStatus();
}

}  // namespace tandem
