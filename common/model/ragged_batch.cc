#include "common/model/ragged_batch.h"

#include <ATen/ATen.h>

#include <algorithm>

namespace tandem {

RaggedBatch MakeRaggedBatch(const std::vector<std::vector<int64_t>>& sequences) {
  RaggedBatch batch;
  batch.offsets = {0};
  for (const auto& sequence : sequences) {
    batch.offsets.push_back(batch.offsets.back() + static_cast<int64_t>(sequence.size()));
  }
  batch.tokens = at::empty({batch.num_tokens()}, at::kLong);
  batch.positions = at::empty({batch.num_tokens()}, at::kLong);
  int64_t* token = batch.tokens.data_ptr<int64_t>();
  int64_t* position = batch.positions.data_ptr<int64_t>();
  for (const auto& sequence : sequences) {
    token = std::copy(sequence.begin(), sequence.end(), token);
    for (size_t i = 0; i < sequence.size(); ++i) *position++ = static_cast<int64_t>(i);
  }
  return batch;
}

}  // namespace tandem
