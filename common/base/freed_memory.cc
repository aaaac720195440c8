#include "common/base/freed_memory.h"

#include <malloc.h>

namespace tandem {

bool ReturnFreedMemory() {
  if (static_cast<int64_t>(mallinfo2().fordblks) <= kMaxFreedBytes) return false;
  return malloc_trim(0) == 1;
}

}  // namespace tandem
