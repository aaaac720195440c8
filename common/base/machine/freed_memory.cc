#include "common/base/machine/freed_memory.h"

#include <malloc.h>

#include <algorithm>
#include <cstdlib>
#include <utility>

namespace tandem {

void KeepFreedMemory() {
  constexpr int kTrimThreshold = 256 << 20;  // more than the buffers of a pass
  constexpr int kMmapThreshold = 32 << 20;   // the most that glibc takes; larger buffers are rare
  mallopt(M_TRIM_THRESHOLD, kTrimThreshold);
  mallopt(M_MMAP_THRESHOLD, kMmapThreshold);
}

bool FreedMemory::Look(SteadyTime now) {
  const struct mallinfo2 info = mallinfo2();
  const auto used = static_cast<int64_t>(info.uordblks);
  const bool works = std::abs(used - std::exchange(used_, used)) > kMaxFreedBytes;
  if (static_cast<int64_t>(info.fordblks) <= kMaxFreedBytes) {
    much_since_ = SteadyTime::InfiniteFuture();
    return false;
  }
  much_since_ = works ? now : std::min(much_since_, now);
  if (now - much_since_ < kFreedTime) return false;
  much_since_ = SteadyTime::InfiniteFuture();
  return malloc_trim(0) == 1;
}

}  // namespace tandem
