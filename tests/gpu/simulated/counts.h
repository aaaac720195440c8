// Counts of the work of a process on the simulated GPUs.
#ifndef TANDEM_TESTS_GPU_SIMULATED_COUNTS_H_
#define TANDEM_TESTS_GPU_SIMULATED_COUNTS_H_

#include <atomic>
#include <cstdint>

namespace tandem::simulated_gpu {

struct Counts {
  std::atomic<int64_t> launches = 0;          // operations that are no views
  std::atomic<int64_t> synchronizations = 0;  // the host waited for a device, not for a group
  // Operations that began on one stream while another one had work for which the host had not
  // waited. Default streams do not count.
  std::atomic<int64_t> beside = 0;
  // Operations that began on a stream of which a copy to the host had not arrived yet. Default
  // streams do not count.
  std::atomic<int64_t> ahead = 0;
  // Operations of process groups for which a stream has waited, and those of them beside which the
  // stream had operations of its own, between their start and its wait.
  std::atomic<int64_t> of_groups = 0, of_groups_beside = 0;
  std::atomic<int64_t> allocations = 0;  // of memory of a device, and of pinned memory
  std::atomic<int64_t> replays = 0;      // of graphs; their operations are no launches
};

Counts& TheCounts();

}  // namespace tandem::simulated_gpu

#endif  // TANDEM_TESTS_GPU_SIMULATED_COUNTS_H_
