// Writes one file to disk, and knows its digest when it is there.
//
//   WrittenFiles written;               // whoever wants the digests
//   TANDEM_ASSIGN_OR_RETURN(FileWriter file, FileWriter::Create(path));
//   TANDEM_RETURN_IF_ERROR(file.Append(bytes));
//   TANDEM_RETURN_IF_ERROR(file.Finish());
//   written.Take();                     // {path, bytes, digest}
#ifndef TANDEM_COMMON_BASE_FILES_FILE_WRITER_H_
#define TANDEM_COMMON_BASE_FILES_FILE_WRITER_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "common/base/checksum.h"
#include "common/base/files/file_descriptor.h"

namespace tandem {

struct WrittenFile {
  std::string path;
  int64_t bytes = 0;
  std::string digest;  // XXH3-128, hex
};

// Lists the files that FileWriters of this thread finish while it lives, by whatever function they
// are written. Their digests are computed as the bytes are written.
class WrittenFiles {
 public:
  WrittenFiles();
  ~WrittenFiles();
  WrittenFiles(const WrittenFiles&) = delete;
  WrittenFiles& operator=(const WrittenFiles&) = delete;

  std::vector<WrittenFile> Take();

 private:
  friend class FileWriter;
  static WrittenFiles*& Current();

  std::vector<WrittenFile> files_;
  WrittenFiles* const outer_;
};

class FileWriter {
 public:
  enum class Place {
    kAtOnce,  // the file has its name from the start: for folders that are under construction
    kBeside,  // it is written under another name beside it, and renamed by Finish
  };

  // Begins a new file, or one in the place of the file of that name.
  static absl::StatusOr<FileWriter> Create(const std::string& path, Place place = Place::kAtOnce);
  FileWriter(FileWriter&& other) noexcept;
  FileWriter& operator=(FileWriter&&) = delete;
  // Removes a file beside its place that is not finished.
  ~FileWriter();

  const std::string& path() const { return path_; }

  // Writes behind the last Append.
  absl::Status Append(absl::string_view bytes);
  // Writes at any place. Ranges do not overlap. Bytes that come before those in front of them are
  // read again for the digest, where one is wanted.
  absl::Status WriteAt(int64_t offset, absl::Span<const std::byte> bytes);

  // Writes all of it to disk, gives the file its name, and lists it. No range may be missing.
  absl::Status Finish();

 private:
  FileWriter(std::string path, std::string temporary, FileDescriptor file);

  // Adds bytes to the digest if they are the next ones, and notes them for later if not.
  absl::Status Digest(int64_t offset, absl::Span<const std::byte> bytes);
  void StartWriteback(size_t bytes);

  std::string path_, temporary_;  // `temporary_` is empty for a file in its place, and when done
  FileDescriptor file_;
  std::optional<Checksum> checksum_;
  int64_t end_ = 0;                   // of Append
  int64_t bytes_ = 0;                 // written
  int64_t digested_ = 0;              // bytes at the front that are in the digest
  std::map<int64_t, int64_t> ahead_;  // ranges behind `digested_`, by begin: their ends
  size_t unsynced_ = 0;               // bytes since the last StartWriteback
};

}  // namespace tandem

#endif  // TANDEM_COMMON_BASE_FILES_FILE_WRITER_H_
