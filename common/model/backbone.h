// A model without its head: what a family implements.
#ifndef TANDEM_COMMON_MODEL_BACKBONE_H_
#define TANDEM_COMMON_MODEL_BACKBONE_H_

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "common/model/attention_context.h"
#include "common/model/ragged_batch.h"

namespace tandem {

// What all blocks of one pass read.
struct ModelPass {
  const RaggedBatch& batch;
  AttentionContext& context;
  at::Tensor rows;      // [R] int64: the only rows that are wanted; undefined for all
  at::Tensor cos, sin;  // [T, head_dim] of the rotation
  // Between the maps of a shard each rank keeps its share of the tokens; false: all of them, and
  // there is no autograd.
  bool shares_tokens = true;
};

class Backbone {
 public:
  virtual ~Backbone() = default;

  // `batch` and `context` must outlive the pass.
  virtual ModelPass StartPass(const RaggedBatch& batch, AttentionContext& context,
                              const at::Tensor& rows) const = 0;

  // What follows `hidden` [T, H], or its share of those tokens where a shard's pass shares them out
  // (common/ops/token_shares.h): block 0 is the embedding, which reads the tokens instead, the
  // last one the final norm, whose result is [T, H] on every rank, and what lies between are the
  // layers.
  virtual int64_t num_blocks() const = 0;
  virtual at::Tensor RunBlock(int64_t block, const at::Tensor& hidden,
                              const ModelPass& pass) const = 0;

  // All of them: [T, H], or only the rows that are wanted.
  at::Tensor Run(const ModelPass& pass) const {
    at::Tensor hidden;
    for (int64_t block = 0; block < num_blocks(); ++block) hidden = RunBlock(block, hidden, pass);
    return hidden;
  }
};

}  // namespace tandem

#endif  // TANDEM_COMMON_MODEL_BACKBONE_H_
