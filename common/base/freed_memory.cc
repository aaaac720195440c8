#include "common/base/freed_memory.h"

#include <malloc.h>

#include <algorithm>

namespace tandem {

bool FreedMemory::Look(absl::Time now) {
  if (static_cast<int64_t>(mallinfo2().fordblks) <= kMaxFreedBytes) {
    much_since_ = absl::InfiniteFuture();
    return false;
  }
  much_since_ = std::min(much_since_, now);
  if (now - much_since_ < kFreedTime) return false;
  much_since_ = absl::InfiniteFuture();
  return malloc_trim(0) == 1;
}

}  // namespace tandem
