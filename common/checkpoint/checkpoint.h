// Step directories that are complete or absent.
//
// A checkpoint is a plain Hugging Face directory (config.json, model.safetensors, tokenizer files)
// with further files beside it. It is written under a temporary name; the manifest, which says what
// it is a checkpoint of and lists every file with its size and XXH3-128 digest, comes last; then
// the directory is renamed. Loading trusts only a manifest whose files all agree.
#ifndef TANDEM_COMMON_CHECKPOINT_CHECKPOINT_H_
#define TANDEM_COMMON_CHECKPOINT_CHECKPOINT_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/checkpoint/temporary_directory.h"

namespace tandem::checkpoint {

inline constexpr char kManifestFile[] = "manifest.json";

// What a checkpoint is of.
struct Identity {
  std::string kind;  // "trainer", "critic"
  int64_t step = 0;  // orders the checkpoints of a kind
};

struct Saved {
  std::string path;   // parent/name
  int64_t bytes = 0;  // of all files
};

// INVALID_ARGUMENT ("name") for what is not a plain file name, or starts with a dot.
absl::Status CheckName(const std::string& name);

// A checkpoint that is being written. What is not committed goes with the object.
class PendingCheckpoint {
 public:
  // Begins parent/name. A checkpoint of that name and kind will be replaced, so that a save may be
  // repeated; anything else that has the name is ALREADY_EXISTS ("name"). What processes that are
  // dead left in `parent` is removed, or put back, first. INVALID_ARGUMENT as CheckName says; an
  // error of "directory" where nothing can be written.
  static absl::StatusOr<PendingCheckpoint> Begin(const std::string& parent, const std::string& name,
                                                 const Identity& identity);

  // Where the files are put, by any process: plain files, no folders.
  const std::string& directory() const { return temporary_.path(); }

  // Writes the manifest and puts the directory in its place, in one step. All files are there and
  // closed. On failure nothing changes: the error of the file that failed.
  absl::StatusOr<Saved> Commit() &&;

 private:
  PendingCheckpoint(std::string target, const Identity& identity, TemporaryDirectory temporary)
      : target_(std::move(target)), identity_(identity), temporary_(std::move(temporary)) {}

  std::string target_;
  Identity identity_;
  TemporaryDirectory temporary_;
};

// Begins, writes and commits a checkpoint: `write_files` is given its directory.
absl::StatusOr<Saved> Save(
    const std::string& parent, const std::string& name, const Identity& identity,
    absl::FunctionRef<absl::Status(const std::string& directory)> write_files);

// Checks the manifest and every byte of every file, after putting back what a crash left of a
// replacement. NOT_FOUND if there is no such directory; DATA_LOSS names the file that is missing,
// truncated, altered, or not listed.
absl::Status Verify(const std::string& path);

struct Listed {
  std::string path;
  Identity identity;
};

// The directories of `parent` that have a manifest (their files are not verified) and are no links,
// by step, then by path. Empty if `parent` does not exist.
std::vector<Listed> List(const std::string& parent);

// Removes the checkpoints of this kind in `parent` that have the lowest steps, until `keep` are
// left, but never `just_saved`; 0 keeps all.
absl::Status Prune(const std::string& parent, const std::string& kind, int64_t keep,
                   const std::string& just_saved);

}  // namespace tandem::checkpoint

#endif  // TANDEM_COMMON_CHECKPOINT_CHECKPOINT_H_
