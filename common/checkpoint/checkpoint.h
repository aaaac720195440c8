// Checkpoints: step directories that are complete or absent.
//
// A checkpoint is a plain Hugging Face directory (config.json, model.safetensors, tokenizer files)
// with further files beside it. It is written under a temporary name; the manifest, which names the
// checkpoint and lists every file with its size and XXH3-128 digest, comes last; then the directory
// is renamed. Loading trusts only a manifest whose files all agree. Saving and loading replace,
// move and remove no directory but checkpoints that are as they were written: a copy, a renamed
// checkpoint and one with further files are the user's.
#ifndef TANDEM_COMMON_CHECKPOINT_CHECKPOINT_H_
#define TANDEM_COMMON_CHECKPOINT_CHECKPOINT_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/base/files/file_writer.h"
#include "common/base/files/paths/confined_folder.h"
#include "common/checkpoint/manifest.h"
#include "common/checkpoint/temporary_directory.h"

namespace tandem::checkpoint {

struct Saved {
  std::string path;   // parent/name
  int64_t bytes = 0;  // of all files
  // Whether it is still being written; `bytes` is 0 then.
  bool pending = false;
};

// INVALID_ARGUMENT ("name") for what is not a plain file name, or starts with a dot.
absl::Status CheckName(const std::string& name);

// A checkpoint that is being written. Its destructor removes what was not committed.
class PendingCheckpoint {
 public:
  // Begins parent/name. A checkpoint that was saved under that name, of the same kind, will be
  // replaced, so that a save may be repeated. Anything else that has the name is ALREADY_EXISTS
  // ("name"), or FAILED_PRECONDITION ("name") for a checkpoint with a file that its manifest does
  // not list. Before that, leftovers of dead processes in `parent` are removed, or put back.
  // INVALID_ARGUMENT as CheckName says; an error of "directory" where nothing can be written.
  static absl::StatusOr<PendingCheckpoint> Begin(const std::string& parent, const std::string& name,
                                                 const Identity& identity);

  // Where the files are put, by any process: plain files, and folders of plain files.
  const std::string& directory() const { return temporary_.path(); }

  // Writes the manifest and puts the directory in its place, in one step. `files` are what all
  // writers have written into it, and synced (file_writer.h): none of them is read again. On
  // failure nothing changes: the error of the file that failed, or as Begin says.
  absl::StatusOr<Saved> Commit(const std::vector<WrittenFile>& files) &&;

 private:
  PendingCheckpoint(std::string target, const Identity& identity, TemporaryDirectory temporary)
      : target_(std::move(target)), identity_(identity), temporary_(std::move(temporary)) {}

  std::string target_;
  Identity identity_;
  TemporaryDirectory temporary_;
};

// Begins, writes and commits a checkpoint: `write_files` is given its directory, and writes with
// the functions of common/base.
absl::StatusOr<Saved> Save(
    const std::string& parent, const std::string& name, const Identity& identity,
    absl::FunctionRef<absl::Status(const std::string& directory)> write_files);

// Checks the manifest and every byte of every file, after putting back what a crash left of a
// replacement. NOT_FOUND if there is no such directory; DATA_LOSS names the file that is missing,
// truncated, altered, or not listed.
absl::Status Verify(const std::string& path);

// The same for a checkpoint that several ranks read, after RecoverDirectory on one of them
// (replace_directory.h). OpenToVerify opens it: NOT_FOUND, or FAILED_PRECONDITION for a link in its
// path. While it is open, VerifyShare checks the manifest, and of the files those that fall to
// `rank`: about 1/ranks of the bytes.
absl::StatusOr<ConfinedFolder> OpenToVerify(const ConfinedPath& path);
absl::Status VerifyShare(const std::string& path, int rank, int ranks);

struct Listed {
  std::string path;
  Identity identity;
};

// Returns the checkpoints in `parent` that have the name under which they were saved (their files
// are not verified) and are no links, by step, then by path. Empty if `parent` does not exist.
std::vector<Listed> List(const std::string& parent);

// Removes the checkpoints beside `just_saved` that are of the same kind and run and have the lowest
// steps, until `keep` are left with it; 0 keeps all. A checkpoint with a file that its manifest
// does not list, and one that is or holds a path of `in_use`, stays, does not count, and is logged.
absl::Status Prune(const std::string& just_saved, const Identity& identity, int64_t keep,
                   const std::vector<std::string>& in_use = {});

}  // namespace tandem::checkpoint

#endif  // TANDEM_COMMON_CHECKPOINT_CHECKPOINT_H_
