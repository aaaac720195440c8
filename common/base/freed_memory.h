// Memory that was freed, and that the allocator keeps for later.
#ifndef TANDEM_COMMON_BASE_FREED_MEMORY_H_
#define TANDEM_COMMON_BASE_FREED_MEMORY_H_

#include <cstdint>

namespace tandem {

inline constexpr int64_t kMaxFreedBytes = 64 << 20;

// Gives freed memory back to the system if the allocator keeps more than kMaxFreedBytes. glibc by
// itself gives back only the end of a heap: after many small buffers on many threads, next to
// nothing. Takes milliseconds. Returns whether memory went back.
bool ReturnFreedMemory();

}  // namespace tandem

#endif  // TANDEM_COMMON_BASE_FREED_MEMORY_H_
