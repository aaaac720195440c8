// The error of memory that ran out, with the settings by which a server takes less.
#ifndef TANDEM_COMMON_BASE_ERRORS_MEMORY_ERROR_H_
#define TANDEM_COMMON_BASE_ERRORS_MEMORY_ERROR_H_

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace tandem {

// RESOURCE_EXHAUSTED that NameMemorySettings recognises; `memory` is the one that is used up, with
// the numbers that are known: "the host's memory". The message reads "<what>: <memory> is used up".
absl::Status OutOfMemoryError(absl::string_view what, absl::string_view memory);

// Adds the settings by which the server takes less memory to the message of an OutOfMemoryError;
// another status stays what it is. Called where work and server are both known.
absl::Status NameMemorySettings(absl::Status status, absl::string_view settings);

}  // namespace tandem

#endif  // TANDEM_COMMON_BASE_ERRORS_MEMORY_ERROR_H_
