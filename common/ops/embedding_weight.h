// The table of an embedding, dense or packed.
#ifndef TANDEM_COMMON_OPS_EMBEDDING_WEIGHT_H_
#define TANDEM_COMMON_OPS_EMBEDDING_WEIGHT_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <utility>

#include "common/ops/ops.h"
#include "common/ops/packed_weight.h"

namespace tandem::ops {

class EmbeddingWeight {
 public:
  EmbeddingWeight() = default;  // no table
  // [V, H], a leaf of autograd where it trains.
  explicit EmbeddingWeight(at::Tensor dense) : dense_(std::move(dense)) {}
  explicit EmbeddingWeight(std::shared_ptr<const PackedWeight> packed)
      : packed_(std::move(packed)) {}

  int64_t rows() const { return packed_ != nullptr ? packed_->out() : dense_.size(0); }
  // tokens [T] int64 -> [T, H] in the table's type, float32 if it is packed.
  at::Tensor Forward(const at::Tensor& tokens) const {
    return packed_ != nullptr ? packed_->Rows(tokens) : Embedding(tokens, dense_);
  }

 private:
  at::Tensor dense_;
  std::shared_ptr<const PackedWeight> packed_;
};

}  // namespace tandem::ops

#endif  // TANDEM_COMMON_OPS_EMBEDDING_WEIGHT_H_
