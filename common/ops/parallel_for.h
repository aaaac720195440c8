// Loops that the threads of the process divide.
#ifndef TANDEM_COMMON_OPS_PARALLEL_FOR_H_
#define TANDEM_COMMON_OPS_PARALLEL_FOR_H_

#include <ATen/Parallel.h>

#include <algorithm>
#include <cstdint>

namespace tandem::ops {

// Below this many multiply-adds (or exponentials) a second thread costs more than it saves.
inline constexpr int64_t kWorkPerThread = 1 << 15;

// Calls fn(begin, end) for consecutive ranges that cover [0, count), on up to at::get_num_threads()
// threads. Each item costs `work` multiply-adds; fewer threads are used for little work. The ranges
// depend on the number of threads, so results must not depend on them. An exception of `fn` is
// rethrown.
template <typename Function>
void ParallelFor(int64_t count, int64_t work, const Function& fn) {
  const int64_t grain = std::max<int64_t>(1, kWorkPerThread / std::max<int64_t>(1, work));
  at::parallel_for(0, count, grain, fn);
}

}  // namespace tandem::ops

#endif  // TANDEM_COMMON_OPS_PARALLEL_FOR_H_
