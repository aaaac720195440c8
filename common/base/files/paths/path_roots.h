// The directories in which clients may name paths.
#ifndef TANDEM_COMMON_BASE_FILES_PATHS_PATH_ROOTS_H_
#define TANDEM_COMMON_BASE_FILES_PATHS_PATH_ROOTS_H_

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "common/base/files/paths/confined_folder.h"

namespace tandem {

class PathRoots {
 public:
  // Allows every path.
  PathRoots() = default;
  // Allows what is inside one of `roots`; no path when there is none.
  explicit PathRoots(std::vector<std::string> roots) : roots_(std::move(roots)) {}

  // Checks the path of a request's `field` as CheckPath does, and returns it as it is to be used:
  // where roots are set with its symbolic links followed, and with the root that holds it. It is
  // opened by ConfinedFolder, which follows no link: what takes the path's place after the check is
  // not opened. PERMISSION_DENIED with reason PATH_OUTSIDE_ROOTS beyond the roots.
  absl::StatusOr<ConfinedPath> Confine(absl::string_view field, const std::string& path) const;

 private:
  std::optional<std::vector<std::string>> roots_;
};

}  // namespace tandem

#endif  // TANDEM_COMMON_BASE_FILES_PATHS_PATH_ROOTS_H_
