// Loops that the threads of the process divide.
#ifndef TANDEM_COMMON_OPS_THREADS_PARALLEL_FOR_H_
#define TANDEM_COMMON_OPS_THREADS_PARALLEL_FOR_H_

#include <ATen/Parallel.h>

#include <algorithm>
#include <cstdint>

#include "common/ops/threads/thread_team.h"

namespace tandem::ops {

// Below this many multiply-adds (or exponentials) a second thread costs more than it saves.
inline constexpr int64_t kWorkPerThread = 1 << 15;

// Returns the number of threads for a loop of `count` items of `work` multiply-adds each: all that
// are set, or 1 for little work.
inline int LoopThreads(int64_t count, int64_t work) {
  return at::in_parallel_region() || count * work <= kWorkPerThread ? 1 : at::get_num_threads();
}

// Calls fn(begin, end) for consecutive ranges that cover [0, count), on up to at::get_num_threads()
// threads. Each item costs `work` multiply-adds; fewer threads are used for little work. The ranges
// depend on the number of threads, so results must not depend on them. `fn` calls no operation that
// divides its work itself, as those of ATen may. An exception of `fn` is rethrown.
template <typename Function>
void ParallelFor(int64_t count, int64_t work, const Function& fn) {
  if (count <= 0) return;
  // More than threads, so that the others take the work of a thread that is interrupted.
  constexpr int64_t kPartsPerThread = 4;
  const int threads = LoopThreads(count, work);
  const int64_t grain = std::max<int64_t>(1, kWorkPerThread / std::max<int64_t>(1, work));
  const int64_t parts =
      threads == 1 ? 1 : std::min((count + grain - 1) / grain, kPartsPerThread * threads);
  ThreadTeam::OfProcess().Run(
      parts, threads, [&](int64_t part) { fn(count * part / parts, count * (part + 1) / parts); });
}

}  // namespace tandem::ops

#endif  // TANDEM_COMMON_OPS_THREADS_PARALLEL_FOR_H_
