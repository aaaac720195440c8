// Which ranks of a rollout server hold which model: a lane's model is shared out, by heads and rows
// of the vocabulary, among the first so many ranks of the server, whatever the other lane has. No
// torch.
#ifndef TANDEM_SERVICES_ROLLOUT_ENGINE_RANK_LAYOUT_H_
#define TANDEM_SERVICES_ROLLOUT_ENGINE_RANK_LAYOUT_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "common/model/model_config.h"

namespace tandem::rollout {

struct RankLayout {
  int64_t tensor_parallel_size = 1;         // ranks of the senior
  int64_t junior_tensor_parallel_size = 1;  // ranks of the junior
  // The CUDA device of the junior on each of its ranks; empty: the senior's.
  std::vector<int32_t> junior_gpu_devices = {};
};

// INVALID_ARGUMENT, with the numbers, where the ranks of the server are not those that the layout
// needs, or do not divide a model. `junior` is nullptr without one.
absl::Status CheckRankLayout(const RankLayout& layout, const ModelConfig& senior,
                             const ModelConfig* junior, int64_t world_size);

}  // namespace tandem::rollout

#endif  // TANDEM_SERVICES_ROLLOUT_ENGINE_RANK_LAYOUT_H_
