// A batch of sequences without padding.
#ifndef TANDEM_COMMON_MODEL_RAGGED_BATCH_H_
#define TANDEM_COMMON_MODEL_RAGGED_BATCH_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace tandem {

// S sequences, T tokens in all. Tensors are on one device, the rest on the host. Sequence s owns
// rows [offsets[s], offsets[s + 1]).
struct RaggedBatch {
  at::Tensor tokens;             // [T] int64
  at::Tensor positions;          // [T] int64; the first token of a whole sequence is at 0
  std::vector<int64_t> offsets;  // S + 1 values from 0 to T, never decreasing
  int64_t positions_end = 0;     // every position is below this

  int64_t num_tokens() const { return offsets.empty() ? 0 : offsets.back(); }
};

// Makes a batch of whole sequences, positions from 0, on the device of the model that will run
// them.
RaggedBatch MakeRaggedBatch(const std::vector<std::vector<int64_t>>& sequences,
                            at::Device device = at::kCPU);

}  // namespace tandem

#endif  // TANDEM_COMMON_MODEL_RAGGED_BATCH_H_
