// The table of an embedding, dense or packed.
#ifndef TANDEM_COMMON_OPS_LINEAR_EMBEDDING_WEIGHT_H_
#define TANDEM_COMMON_OPS_LINEAR_EMBEDDING_WEIGHT_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <utility>

#include "common/ops/ops.h"
#include "common/ops/products/bfloat16_rounding.h"
#include "common/ops/products/packed_weight.h"

namespace tandem::ops {

class EmbeddingWeight {
 public:
  EmbeddingWeight() = default;  // no table
  // [V, H], a leaf of autograd where it trains. With `rounds`, the results are rounded to the
  // values of bfloat16 (common/ops/products/bfloat16_rounding.h).
  explicit EmbeddingWeight(at::Tensor dense, bool rounds = false)
      : dense_(std::move(dense)), rounds_(rounds) {}
  explicit EmbeddingWeight(std::shared_ptr<const PackedWeight> packed)
      : packed_(std::move(packed)) {}

  int64_t rows() const { return packed_ != nullptr ? packed_->out() : dense_.size(0); }
  // tokens [T] int64 -> [T, H] in the table's type, float32 if it is packed.
  at::Tensor Forward(const at::Tensor& tokens) const {
    if (packed_ != nullptr) return packed_->Rows(tokens);
    const at::Tensor rows = Embedding(tokens, dense_);
    return rounds_ ? Rounded(rows) : rows;
  }

 private:
  at::Tensor dense_;
  bool rounds_ = false;
  std::shared_ptr<const PackedWeight> packed_;
};

}  // namespace tandem::ops

#endif  // TANDEM_COMMON_OPS_LINEAR_EMBEDDING_WEIGHT_H_
