#include "common/base/files/shared_file.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/errors/status_macros.h"

namespace tandem {
namespace {

class BytesOfFile final : public SharedBytes {
 public:
  explicit BytesOfFile(FileDescriptor file) : file_(std::move(file)) {}

  absl::Status Read(int64_t offset, absl::Span<std::byte> out) const override {
    return file_.ReadAllAt(offset, out);
  }

 private:
  const FileDescriptor file_;
};

}  // namespace

absl::StatusOr<SharedFile> Share(const FileDescriptor& file) {
  struct stat info = {};
  if (::fstat(file.get(), &info) != 0) return FileError(errno, "cannot stat", file.path());
  return SharedFile{
      .process = ::getpid(), .descriptor = file.get(), .device = info.st_dev, .inode = info.st_ino};
}

absl::StatusOr<std::shared_ptr<const SharedBytes>> OpenShared(const SharedFile& shared) {
  const std::string path = absl::StrCat("/proc/", shared.process, "/fd/", shared.descriptor);
  TANDEM_ASSIGN_OR_RETURN(FileDescriptor file, FileDescriptor::OpenRegular(path));
  struct stat info = {};
  if (::fstat(file.get(), &info) != 0) return FileError(errno, "cannot stat", path);
  if (info.st_dev != shared.device || info.st_ino != shared.inode) {
    return absl::FailedPreconditionError(absl::StrCat(path, ": another file"));
  }
  if (info.st_nlink != 0) {
    return absl::FailedPreconditionError(absl::StrCat(path, ": a file with a name"));
  }
  return std::make_shared<const BytesOfFile>(std::move(file));
}

}  // namespace tandem
