#include "common/base/files/file_writer.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/errors/status_macros.h"
#include "common/base/files/atomic_file.h"
#include "common/base/files/paths/confined_folder.h"

namespace tandem {
namespace {

// Bytes after which the disk is made to write what it has. A single fsync of all that memory can
// hold of a large file could take longer than any time limit, without a sign of progress.
constexpr size_t kWritebackBytes = size_t{32} << 20;

}  // namespace

WrittenFiles::WrittenFiles() : outer_(std::exchange(Current(), this)) {}

WrittenFiles::~WrittenFiles() { Current() = outer_; }

std::vector<WrittenFile> WrittenFiles::Take() { return std::exchange(files_, {}); }

WrittenFiles*& WrittenFiles::Current() {
  thread_local WrittenFiles* current = nullptr;
  return current;
}

absl::StatusOr<FileWriter> FileWriter::Create(const std::string& path, Place place) {
  std::string temporary =
      place == Place::kBeside ? absl::StrCat(path, ".tmp.", ::getpid()) : std::string();
  TANDEM_ASSIGN_OR_RETURN(
      FileDescriptor file,
      FileDescriptor::Open(temporary.empty() ? path : temporary, O_RDWR | O_CREAT | O_TRUNC));
  return FileWriter(path, std::move(temporary), std::move(file));
}

FileWriter::FileWriter(std::string path, std::string temporary, FileDescriptor file)
    : path_(std::move(path)), temporary_(std::move(temporary)), file_(std::move(file)) {
  if (WrittenFiles::Current() != nullptr) checksum_.emplace();
}

FileWriter::FileWriter(FileWriter&& other) noexcept
    : path_(std::move(other.path_)),
      temporary_(std::exchange(other.temporary_, {})),
      file_(std::move(other.file_)),
      checksum_(std::move(other.checksum_)),
      end_(other.end_),
      bytes_(other.bytes_),
      digested_(other.digested_),
      ahead_(std::move(other.ahead_)),
      unsynced_(other.unsynced_) {}

FileWriter::~FileWriter() {
  if (!temporary_.empty()) ::unlink(SystemPath(temporary_).c_str());
}

absl::Status FileWriter::Append(absl::string_view bytes) {
  const auto* const data = reinterpret_cast<const std::byte*>(bytes.data());
  const int64_t offset = std::exchange(end_, end_ + static_cast<int64_t>(bytes.size()));
  return WriteAt(offset, {data, bytes.size()});
}

absl::Status FileWriter::WriteAt(int64_t offset, absl::Span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const auto chunk = bytes.subspan(0, kTransferBytes);
    TANDEM_RETURN_IF_ERROR(file_.WriteAllAt(offset, chunk));
    TANDEM_RETURN_IF_ERROR(Digest(offset, chunk));
    StartWriteback(chunk.size());
    bytes_ += static_cast<int64_t>(chunk.size());
    offset += static_cast<int64_t>(chunk.size());
    bytes.remove_prefix(chunk.size());
  }
  return absl::OkStatus();
}

absl::Status FileWriter::Digest(int64_t offset, absl::Span<const std::byte> bytes) {
  if (!checksum_.has_value()) return absl::OkStatus();
  const int64_t end = offset + static_cast<int64_t>(bytes.size());
  if (offset != digested_) {
    ahead_[offset] = end;
    return absl::OkStatus();
  }
  checksum_->Update(bytes.data(), bytes.size());
  digested_ = end;
  std::vector<std::byte> buffer;
  for (auto next = ahead_.begin(); next != ahead_.end() && next->first == digested_;
       next = ahead_.erase(next)) {
    buffer.resize(static_cast<size_t>(next->second - next->first));
    TANDEM_RETURN_IF_ERROR(file_.ReadAllAt(next->first, absl::MakeSpan(buffer)));
    checksum_->Update(buffer.data(), buffer.size());
    digested_ = next->second;
  }
  return absl::OkStatus();
}

void FileWriter::StartWriteback(size_t bytes) {
  unsynced_ += bytes;
  if (unsynced_ < kWritebackBytes) return;
  unsynced_ = 0;
  // Waits for what it started the last time. Where the file system cannot, Finish does it all.
  ::sync_file_range(file_.get(), 0, 0, SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE);
}

absl::Status FileWriter::Finish() {
  if (checksum_.has_value() && digested_ != bytes_) {
    return absl::InternalError(absl::StrCat(path_, ": no bytes were written at ", digested_));
  }
  TANDEM_RETURN_IF_ERROR(file_.Sync());
  if (!temporary_.empty()) {
    TANDEM_RETURN_IF_ERROR(RenameDurably(temporary_, path_));
    temporary_.clear();
  }
  if (WrittenFiles* const written = WrittenFiles::Current();
      written != nullptr && checksum_.has_value()) {
    written->files_.push_back({.path = path_, .bytes = bytes_, .digest = checksum_->Hex()});
  }
  return absl::OkStatus();
}

}  // namespace tandem
