// Ranks that compute on the same GPU, among which NCCL makes no process group.
#ifndef TANDEM_COMMON_RANKS_TRANSPORT_GPU_SHARING_H_
#define TANDEM_COMMON_RANKS_TRANSPORT_GPU_SHARING_H_

#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace tandem::ranks {

// Returns two ranks that have the same GPU, the first such ones; nullopt: each has its own. `gpus`
// has the GPU of every rank, by a name that no other GPU of any machine has.
std::optional<std::pair<int, int>> RanksOnOneGpu(const std::vector<std::string>& gpus);

}  // namespace tandem::ranks

#endif  // TANDEM_COMMON_RANKS_TRANSPORT_GPU_SHARING_H_
