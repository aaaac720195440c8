// How much memory the process may still take.
#ifndef TANDEM_COMMON_BASE_AVAILABLE_MEMORY_H_
#define TANDEM_COMMON_BASE_AVAILABLE_MEMORY_H_

#include <cstdint>
#include <optional>
#include <string>

namespace tandem {

// The smallest of what the kernel calls available (MemAvailable) and what the limits of the
// process's control groups (v2) leave, page cache excluded; nullopt where the system does not say.
// Tests give a `root` folder with a proc and a sys of their own.
std::optional<int64_t> AvailableMemoryBytes(const std::string& root = "");

}  // namespace tandem

#endif  // TANDEM_COMMON_BASE_AVAILABLE_MEMORY_H_
