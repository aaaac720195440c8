// A model without its head. A family names its backbone (family.h).
#ifndef TANDEM_COMMON_MODEL_PASSES_BACKBONE_H_
#define TANDEM_COMMON_MODEL_PASSES_BACKBONE_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "common/model/passes/attention_context.h"
#include "common/model/passes/ragged_batch.h"

namespace tandem {

struct Rotation {
  at::Tensor cos, sin;  // [T, half of the columns of a head that are rotated]
};

// The state that all blocks of one pass read.
struct ModelPass {
  const RaggedBatch& batch;
  AttentionContext& context;
  at::Tensor rows;                // [R] int64: the rows whose output is wanted; undefined: all
  Rotation rotation;              // of every token
  Rotation window_rotation = {};  // in layers with a window, if ModelConfig has a window_rope
  // Whether a rank of a sharded model keeps only its shard of the tokens between linear maps.
  // Without that it keeps all tokens, and there is no autograd.
  bool shards_tokens = true;
};

class Backbone {
 public:
  virtual ~Backbone() = default;

  // `batch` and `context` must outlive the pass.
  virtual ModelPass StartPass(const RaggedBatch& batch, AttentionContext& context,
                              const at::Tensor& rows) const = 0;

  // Makes the tables of positions for all below `end`.
  virtual void ReservePositions(int64_t end) const = 0;

  // Runs one block on `hidden` [T, H] and returns its output. Block 0 is the embedding, which reads
  // the tokens of the pass instead; the last block is the final norm, whose output is [T, H] on
  // every rank; those in between are the layers. Where the pass shards tokens, hidden states
  // between blocks are this rank's shard of them.
  virtual int64_t num_blocks() const = 0;
  virtual at::Tensor RunBlock(int64_t block, const at::Tensor& hidden,
                              const ModelPass& pass) const = 0;

  // Returns the rows [VisionConfig::Rows, H] of images in the place of their tokens, for passes
  // that get them computed (BatchImages::rows_of_tower). Needs a model with a vision tower and its
  // block. pixel_values [P, patch_values] are those of `grids`, one after the other.
  virtual at::Tensor ImageRows(const at::Tensor& pixel_values,
                               const std::vector<VisionGrid>& grids) const = 0;

  // Runs all blocks: [T, H], or the wanted rows alone.
  at::Tensor Run(const ModelPass& pass) const {
    at::Tensor hidden;
    for (int64_t block = 0; block < num_blocks(); ++block) hidden = RunBlock(block, hidden, pass);
    return hidden;
  }
};

}  // namespace tandem

#endif  // TANDEM_COMMON_MODEL_PASSES_BACKBONE_H_
