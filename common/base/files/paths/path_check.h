// Paths of the server's file system in requests and configurations.
#ifndef TANDEM_COMMON_BASE_FILES_PATHS_PATH_CHECK_H_
#define TANDEM_COMMON_BASE_FILES_PATHS_PATH_CHECK_H_

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace tandem {

// INVALID_ARGUMENT naming `field` for a path that is empty, holds a NUL byte, or begins with "~":
// that is the shell's abbreviation, which a server would take for a folder of that name.
absl::Status CheckPath(absl::string_view field, absl::string_view path);

}  // namespace tandem

#endif  // TANDEM_COMMON_BASE_FILES_PATHS_PATH_CHECK_H_
