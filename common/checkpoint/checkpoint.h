// Step directories that are complete or absent.
//
// A checkpoint is a plain Hugging Face directory (config.json, model.safetensors, tokenizer files)
// with further files beside it. It is written under a temporary name; the manifest, which lists
// every file with its size and XXH3-128 digest, comes last; then the directory is renamed. Loading
// trusts only a manifest whose files all agree.
#ifndef TANDEM_COMMON_CHECKPOINT_CHECKPOINT_H_
#define TANDEM_COMMON_CHECKPOINT_CHECKPOINT_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace tandem::checkpoint {

inline constexpr char kManifestFile[] = "manifest.json";

struct Saved {
  std::string path;   // parent/name
  int64_t bytes = 0;  // of all files
};

// Writes parent/name. `write_files` puts plain files (no folders) into the directory it is given.
// A checkpoint of that name is replaced atomically. What earlier crashes left behind under
// this name is removed. On failure nothing changes. INVALID_ARGUMENT for a name that is not a plain
// file name; otherwise the error of the file that failed.
absl::StatusOr<Saved> Save(
    const std::string& parent, const std::string& name,
    absl::FunctionRef<absl::Status(const std::string& directory)> write_files);

// Checks the manifest and every byte of every file. NOT_FOUND if there is no such directory;
// DATA_LOSS names the file that is missing, truncated, altered, or not listed.
absl::Status Verify(const std::string& path);

// Step directories of `parent` that have a manifest (not verified), oldest first: by name, numbers
// inside the name by value. Empty if `parent` does not exist.
std::vector<std::string> List(const std::string& parent);

// Removes the oldest of those step directories of `parent` for which `is_ours` says true, until
// `keep` are left, but never `just_saved`; 0 keeps all.
absl::Status Prune(const std::string& parent, int64_t keep, const std::string& just_saved,
                   absl::FunctionRef<bool(const std::string& path)> is_ours);

}  // namespace tandem::checkpoint

#endif  // TANDEM_COMMON_CHECKPOINT_CHECKPOINT_H_
