// Memory that was freed, and that the allocator keeps for later.
#ifndef TANDEM_COMMON_BASE_MACHINE_FREED_MEMORY_H_
#define TANDEM_COMMON_BASE_MACHINE_FREED_MEMORY_H_

#include <cstdint>

#include "absl/time/time.h"
#include "common/base/steady_time.h"

namespace tandem {

inline constexpr int64_t kMaxFreedBytes = 64 << 20;
// How long more than that must have been free before it is given back. Work that goes on takes what
// it frees again, and pages that come back from the system cost it time: an eighth of the CPU time
// of a training step of SmolLM2. In a run a trainer is idle while responses are generated, and a
// plan of the memory has counted what it keeps.
inline constexpr absl::Duration kFreedTime = absl::Minutes(5);

// Lets the allocator keep what is freed until FreedMemory gives it back. By default glibc gives the
// end of a heap back as soon as it has some 20 MB, which a pass over 1,000 tokens frees and takes
// in every layer: more than a quarter of the time of SmolLM2's prefill went into such pages. Called
// once, at the start of a process.
void KeepFreedMemory();

// Gives freed memory back to the system if the allocator has kept more than kMaxFreedBytes in every
// look for kFreedTime, while what is in use moved by no more than that from one look to the next:
// train steps, whose activations come and go, keep their pages. glibc by itself gives back only the
// end of a heap: after many small buffers on many threads, next to nothing.
class FreedMemory {
 public:
  // Looks; takes milliseconds. Returns whether memory went back. To be called about every second.
  bool Look(SteadyTime now);

 private:
  SteadyTime much_since_ = SteadyTime::InfiniteFuture();
  int64_t used_ = 0;  // in the last look
};

}  // namespace tandem

#endif  // TANDEM_COMMON_BASE_MACHINE_FREED_MEMORY_H_
