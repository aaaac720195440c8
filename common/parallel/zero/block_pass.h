// Runs one micro-batch through the blocks of a model and back, block by block. The caller may hold
// only some of the blocks, or the parameters of one block at a time.
#ifndef TANDEM_COMMON_PARALLEL_ZERO_BLOCK_PASS_H_
#define TANDEM_COMMON_PARALLEL_ZERO_BLOCK_PASS_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "common/model/model.h"
#include "common/model/passes/attention_context.h"
#include "common/model/passes/ragged_batch.h"
#include "common/parallel/memory/recompute.h"

namespace tandem::parallel {

class BlockPass {
 public:
  // `model` must outlive the pass. `context` belongs to `batch`.
  BlockPass(const Model& model, RaggedBatch batch,
            std::unique_ptr<AttentionContext> context = std::make_unique<CausalContext>(),
            Recompute recompute = Recompute::kNone);

  BlockPass(const BlockPass&) = delete;
  BlockPass& operator=(const BlockPass&) = delete;

  const RaggedBatch& batch() const { return batch_; }

  // Runs the next block on `hidden`, which the previous block returned or another process sent
  // (undefined for block 0). Returns a leaf, which requires a gradient if anything before it does.
  at::Tensor Forward(int64_t block, const at::Tensor& hidden);

  // Runs all blocks. Returns the hidden states after the final norm.
  at::Tensor ForwardAll();

  // Runs back the last block that ran and has not run back: adds to the gradients of its
  // parameters, forgets the block, and returns the gradient of its input. `gradient` is that of its
  // output; undefined where nothing requires it.
  at::Tensor Backward(const at::Tensor& gradient);
  // Runs back all blocks that ran. Returns the gradient of the first one's input.
  at::Tensor BackwardAll(at::Tensor gradient);

 private:
  struct Run {
    int64_t block;
    at::Tensor input, output;  // a leaf, and the end of the block's graph
    bool recomputes;           // the block has no graph: it runs again
  };

  const Model& model_;
  const Recompute recompute_;
  const RaggedBatch batch_;
  const std::unique_ptr<AttentionContext> context_;
  const ModelPass pass_;
  std::vector<Run> runs_;
};

}  // namespace tandem::parallel

#endif  // TANDEM_COMMON_PARALLEL_ZERO_BLOCK_PASS_H_
