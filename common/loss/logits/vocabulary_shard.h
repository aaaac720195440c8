// The token ids whose logits one rank computes.
#ifndef TANDEM_COMMON_LOSS_LOGITS_VOCABULARY_SHARD_H_
#define TANDEM_COMMON_LOSS_LOGITS_VOCABULARY_SHARD_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "common/ops/products/matrix_rows.h"
#include "common/ops/shards/tensor_parallel_group.h"

namespace tandem::loss {

// The rows of an output layer that a rank holds. Every rank holds at least one row, and the rows of
// rank r + 1 follow those of rank r.
struct VocabularyShard {
  // The ranks that compute the output layer together. With nullptr this process computes all of it,
  // and the other fields have no meaning.
  std::shared_ptr<ops::TensorParallelGroup> group = nullptr;
  int64_t first = 0;  // token id of this rank's first row
  int64_t size = 0;   // number of token ids of all ranks together
  // Rows of the rank that has most. All ranks plan their chunks by this number, so that all of them
  // exchange equally many.
  int64_t most_rows = 0;

  bool is_whole() const { return group == nullptr || group->size() == 1; }
  // Returns this shard, with the fields filled in for a process that computes all `rows` itself.
  VocabularyShard WithRows(int64_t rows) const {
    if (!is_whole()) return *this;
    return {.group = nullptr, .first = 0, .size = rows, .most_rows = rows};
  }
};

// Returns INVALID_ARGUMENT for "vocabulary" if `weight` [rows, H] cannot be this rank's rows.
absl::Status CheckVocabularyShard(const VocabularyShard& shard, const ops::MatrixRows& weight);

}  // namespace tandem::loss

#endif  // TANDEM_COMMON_LOSS_LOGITS_VOCABULARY_SHARD_H_
