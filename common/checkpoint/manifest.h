// The manifest of a checkpoint: which checkpoint a directory is, and every file that it consists
// of. It is written last, so a directory without one is not complete; a directory whose manifest
// names another checkpoint, or that holds other files too, is not a program's to move or remove.
#ifndef TANDEM_COMMON_CHECKPOINT_MANIFEST_H_
#define TANDEM_COMMON_CHECKPOINT_MANIFEST_H_

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/base/files/file_writer.h"

namespace tandem::checkpoint {

inline constexpr char kManifestFile[] = "manifest.json";

// Says which checkpoint it is.
struct Identity {
  std::string kind;         // "trainer", "critic"
  int64_t step = 0;         // orders the checkpoints of a run
  std::string run_id = {};  // the run that the weights are from; empty before its first step
};

struct Manifest {
  struct File {
    std::string name;  // "config.json", or "folder/config.json"
    int64_t bytes = 0;
    std::string digest;  // XXH3-128, hex
  };

  // Name of the directory that was written; empty in manifests of versions that did not record it.
  std::string name;
  Identity identity;
  std::vector<File> files;
};

// Whether `name` is a plain file name that does not start with a dot.
bool IsPlainName(const std::string& name);

// DATA_LOSS for anything that is not exactly a manifest.
absl::StatusOr<Manifest> ReadManifest(const std::filesystem::path& directory);

// Writes the manifest of `directory`, which holds exactly `files`, whose bytes are on disk. Returns
// the bytes of the files, none of which is read. INTERNAL for a file of the directory that is not
// in `files`, and for what is neither a plain file nor a folder of plain files; DATA_LOSS for one
// of `files` that is missing or has another size.
absl::StatusOr<int64_t> WriteManifest(const std::filesystem::path& directory,
                                      const std::string& name, const Identity& identity,
                                      const std::vector<WrittenFile>& files);

// Compares with the manifest which files there are, their sizes, and the bytes of those that fall
// to `rank` of `ranks`, which have about as many bytes each. DATA_LOSS names the file that is
// missing, truncated, altered, not listed, or no file but a link or a device.
absl::Status VerifyFiles(const std::filesystem::path& directory, const Manifest& manifest,
                         int rank = 0, int ranks = 1);

// OK if `directory` is the checkpoint that was written as `name`, and holds its own files alone:
// then it may be replaced or removed. FAILED_PRECONDITION ("name") names the file that the manifest
// does not list, ALREADY_EXISTS ("name") for what is no such checkpoint, or a link.
absl::Status CheckOwned(const std::filesystem::path& directory, const std::string& name);

}  // namespace tandem::checkpoint

#endif  // TANDEM_COMMON_CHECKPOINT_MANIFEST_H_
