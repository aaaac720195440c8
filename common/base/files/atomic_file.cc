#include "common/base/files/atomic_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/base/errors/status_macros.h"
#include "common/base/files/file_descriptor.h"
#include "common/base/files/file_writer.h"
#include "common/base/files/paths/confined_folder.h"

namespace tandem {
namespace {

std::string ParentOf(const std::string& path) {
  const std::string parent = std::filesystem::path(path).parent_path().string();
  return parent.empty() ? "." : parent;
}

}  // namespace

absl::Status SyncPath(const std::string& path) {
  TANDEM_ASSIGN_OR_RETURN(const FileDescriptor file, FileDescriptor::Open(path, O_RDONLY));
  return file.Sync();
}

absl::Status WriteFileDurably(const std::string& path, absl::string_view contents) {
  TANDEM_ASSIGN_OR_RETURN(FileWriter file, FileWriter::Create(path));
  TANDEM_RETURN_IF_ERROR(file.Append(contents));
  return file.Finish();
}

absl::Status RenameDurably(const std::string& from, const std::string& to) {
  if (::rename(SystemPath(from).c_str(), SystemPath(to).c_str()) != 0) {
    return FileError(errno, "cannot rename to", to);
  }
  return SyncPath(ParentOf(to));
}

absl::Status WriteFileAtomically(const std::string& path, absl::string_view contents) {
  TANDEM_ASSIGN_OR_RETURN(FileWriter file, FileWriter::Create(path, FileWriter::Place::kBeside));
  TANDEM_RETURN_IF_ERROR(file.Append(contents));
  return file.Finish();
}

absl::Status ForEachChunk(const std::string& path,
                          absl::FunctionRef<absl::Status(absl::string_view chunk)> visit) {
  TANDEM_ASSIGN_OR_RETURN(const FileDescriptor file, FileDescriptor::OpenRegular(path));
  std::vector<char> buffer(kTransferBytes);
  while (true) {
    TANDEM_ASSIGN_OR_RETURN(const size_t count, file.Read(buffer.data(), buffer.size()));
    if (count == 0) return absl::OkStatus();
    TANDEM_RETURN_IF_ERROR(visit(absl::string_view(buffer.data(), count)));
  }
}

absl::StatusOr<std::string> ReadFile(const std::string& path, size_t max_bytes) {
  std::string contents;
  TANDEM_RETURN_IF_ERROR(ForEachChunk(path, [&](absl::string_view chunk) -> absl::Status {
    if (chunk.size() > max_bytes - contents.size()) {
      return absl::InvalidArgumentError(
          absl::StrCat(path, ": larger than the limit of ", max_bytes, " bytes"));
    }
    contents.append(chunk.data(), chunk.size());
    return absl::OkStatus();
  }));
  return contents;
}

absl::Status CopyFileDurably(const std::string& from, const std::string& to) {
  TANDEM_ASSIGN_OR_RETURN(FileWriter target, FileWriter::Create(to));
  TANDEM_RETURN_IF_ERROR(
      ForEachChunk(from, [&](absl::string_view chunk) { return target.Append(chunk); }));
  return target.Finish();
}

}  // namespace tandem
