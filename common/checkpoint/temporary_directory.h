// Directories under construction, beside what they are to become.
#ifndef TANDEM_COMMON_CHECKPOINT_TEMPORARY_DIRECTORY_H_
#define TANDEM_COMMON_CHECKPOINT_TEMPORARY_DIRECTORY_H_

#include <string>

#include "absl/status/statusor.h"

namespace tandem::checkpoint {

// ".tmp-<process>-<name>", in the same parent.
std::string TemporaryName(const std::string& name);

// Creates the empty directory parent/TemporaryName(name), and `parent` if need be; what earlier
// crashes left under such names is removed first. Returns its path; errors name the path.
absl::StatusOr<std::string> CreateTemporaryDirectory(const std::string& parent,
                                                     const std::string& name);

}  // namespace tandem::checkpoint

#endif  // TANDEM_COMMON_CHECKPOINT_TEMPORARY_DIRECTORY_H_
