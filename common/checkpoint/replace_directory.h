// Puts one checkpoint in the place of another so that a crash at any moment loses neither.
#ifndef TANDEM_COMMON_CHECKPOINT_REPLACE_DIRECTORY_H_
#define TANDEM_COMMON_CHECKPOINT_REPLACE_DIRECTORY_H_

#include <functional>
#include <string>

#include "absl/status/status.h"

namespace tandem::checkpoint {

// Exchanges two paths in one step; returns 0 or the errno.
using ExchangePaths = std::function<int(const std::string& a, const std::string& b)>;

// renameat2(2) with RENAME_EXCHANGE.
int ExchangePathsBySystemCall(const std::string& a, const std::string& b);

// Moves the directory `from` to `to`, in the same parent; an old `to`, a checkpoint, is removed.
// Atomic where the file system can exchange two names. Elsewhere (NFS, some overlays) the old
// checkpoint steps aside as ".tandem-old-<name>" first: RecoverDirectory undoes what a crash in
// between leaves. On failure `to` is as it was, and `from` is still there. ALREADY_EXISTS where
// something else has the name of the old checkpoint.
absl::Status ReplaceDirectory(const std::string& from, const std::string& to,
                              const ExchangePaths& exchange = ExchangePathsBySystemCall);

// After a crash: moves the checkpoint `path` back if it stepped aside and `path` is missing, and
// removes it if `path` exists. Leaves alone whatever is not that checkpoint (CheckOwned).
absl::Status RecoverDirectory(const std::string& path);

}  // namespace tandem::checkpoint

#endif  // TANDEM_COMMON_CHECKPOINT_REPLACE_DIRECTORY_H_
