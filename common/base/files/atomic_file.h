// Files and folders that are either complete or absent after a crash: write under a temporary name,
// fsync, rename, fsync the folder.
#ifndef TANDEM_COMMON_BASE_FILES_ATOMIC_FILE_H_
#define TANDEM_COMMON_BASE_FILES_ATOMIC_FILE_H_

#include <cstddef>
#include <limits>
#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace tandem {

// Every function below names the path in its error; the codes are those of FileError
// (file_descriptor.h). Those that read take regular files alone. What they write is listed by a
// WrittenFiles of their thread (file_writer.h).

// Replaces `path` by `contents` in one atomic, durable step. Nothing is left behind on failure.
absl::Status WriteFileAtomically(const std::string& path, absl::string_view contents);

// Creates or truncates `path`, writes `contents` and fsyncs it. For files inside a folder that is
// itself still under a temporary name.
absl::Status WriteFileDurably(const std::string& path, absl::string_view contents);

// The whole file; INVALID_ARGUMENT for one that is longer than `max_bytes`.
absl::StatusOr<std::string> ReadFile(const std::string& path,
                                     size_t max_bytes = std::numeric_limits<size_t>::max());

// Calls `visit` with the file's bytes in chunks of at most 1 MiB, in order, until it fails.
absl::Status ForEachChunk(const std::string& path,
                          absl::FunctionRef<absl::Status(absl::string_view chunk)> visit);

// Copies the bytes of `from` to `to` and fsyncs them.
absl::Status CopyFileDurably(const std::string& from, const std::string& to);

// fsync of a file, or of a folder's entries.
absl::Status SyncPath(const std::string& path);

// rename(2) followed by fsync of the folder that holds `to`. Both must be on one file system.
absl::Status RenameDurably(const std::string& from, const std::string& to);

}  // namespace tandem

#endif  // TANDEM_COMMON_BASE_FILES_ATOMIC_FILE_H_
