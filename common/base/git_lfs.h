// Files that git-lfs has not downloaded: a small text stands in the place of the content.
#ifndef TANDEM_COMMON_BASE_GIT_LFS_H_
#define TANDEM_COMMON_BASE_GIT_LFS_H_

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace tandem {

inline bool IsGitLfsPointer(absl::string_view content) {
  return absl::StartsWith(content, "version https://git-lfs.github.com/spec/");
}

inline absl::Status GitLfsPointerError(absl::string_view path) {
  return absl::InvalidArgumentError(absl::StrCat(
      path, ": is a git-lfs pointer, not the file itself: run `git lfs pull` in its repository"));
}

}  // namespace tandem

#endif  // TANDEM_COMMON_BASE_GIT_LFS_H_
