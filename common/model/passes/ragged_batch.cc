#include "common/model/passes/ragged_batch.h"

#include <ATen/ATen.h>

#include <algorithm>

namespace tandem {

RaggedBatch MakeRaggedBatch(const std::vector<std::vector<int64_t>>& sequences, at::Device device) {
  RaggedBatch batch;
  batch.offsets = {0};
  for (const auto& sequence : sequences) {
    const auto length = static_cast<int64_t>(sequence.size());
    batch.offsets.push_back(batch.offsets.back() + length);
    batch.positions_end = std::max(batch.positions_end, length);
  }
  const at::Tensor host = at::empty({2, batch.num_tokens()}, at::kLong);
  int64_t* token = host.data_ptr<int64_t>();
  int64_t* position = token + batch.num_tokens();
  for (const auto& sequence : sequences) {
    token = std::copy(sequence.begin(), sequence.end(), token);
    for (size_t i = 0; i < sequence.size(); ++i) *position++ = static_cast<int64_t>(i);
  }
  const at::Tensor uploaded = host.to(device);
  batch.tokens = uploaded[0];
  batch.positions = uploaded[1];
  return batch;
}

}  // namespace tandem
