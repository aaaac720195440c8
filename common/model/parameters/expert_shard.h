// The experts of a model that a rank holds. No torch.
#ifndef TANDEM_COMMON_MODEL_PARAMETERS_EXPERT_SHARD_H_
#define TANDEM_COMMON_MODEL_PARAMETERS_EXPERT_SHARD_H_

#include <cstdint>

namespace tandem {

// Range `index` of the `count` equal, consecutive ranges of each layer's experts. One: all experts.
struct ExpertShard {
  int64_t index = 0;
  int64_t count = 1;
  // Whether tensor-parallel ranks hold these experts whole, in the place of a shard of every
  // expert.
  bool whole = false;

  // Return, for a layer of `num_experts`, which `count` divides, their number and the first one.
  int64_t Size(int64_t num_experts) const { return num_experts / count; }
  int64_t Begin(int64_t num_experts) const { return index * Size(num_experts); }
};

// Expert `index` of the `count` experts of a layer.
struct ExpertOfLayer {
  int64_t index = 0;
  int64_t count = 1;

  bool IsIn(const ExpertShard& shard) const { return index / shard.Size(count) == shard.index; }
};

}  // namespace tandem

#endif  // TANDEM_COMMON_MODEL_PARAMETERS_EXPERT_SHARD_H_
