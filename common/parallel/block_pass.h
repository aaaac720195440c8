// A micro-batch's way through the blocks of a model and back, block by block: whoever runs it may
// hold only some of the blocks, or the parameters of one at a time.
#ifndef TANDEM_COMMON_PARALLEL_BLOCK_PASS_H_
#define TANDEM_COMMON_PARALLEL_BLOCK_PASS_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "common/model/attention_context.h"
#include "common/model/model.h"
#include "common/model/ragged_batch.h"
#include "common/parallel/recompute.h"

namespace tandem::parallel {

class BlockPass {
 public:
  // `model` must outlive the pass. `context` is of `batch`.
  BlockPass(const Model& model, RaggedBatch batch,
            std::unique_ptr<AttentionContext> context = std::make_unique<CausalContext>(),
            Recompute recompute = Recompute::kNone);

  BlockPass(const BlockPass&) = delete;
  BlockPass& operator=(const BlockPass&) = delete;

  const RaggedBatch& batch() const { return batch_; }

  // Runs the next block on `hidden`, what the one before it returned or another process sent
  // (undefined for block 0). The result is a leaf; it requires a gradient if anything up to it
  // does.
  at::Tensor Forward(int64_t block, const at::Tensor& hidden);

  // All blocks: the hidden states after the final norm.
  at::Tensor ForwardAll();

  // The last block that ran and has not run back: adds to the gradients of its parameters, forgets
  // the block, and returns the gradient of what it was given. `gradient` is that of what it
  // returned; undefined where nothing requires it.
  at::Tensor Backward(const at::Tensor& gradient);
  // All that ran. Returns the gradient of what the first of them was given.
  at::Tensor BackwardAll(at::Tensor gradient);

 private:
  struct Run {
    int64_t block;
    at::Tensor input, output;  // a leaf, and the end of the block's graph
    bool recomputes;           // there is no graph: the block runs again
  };

  const Model& model_;
  const Recompute recompute_;
  const RaggedBatch batch_;
  const std::unique_ptr<AttentionContext> context_;
  const ModelPass pass_;
  std::vector<Run> runs_;
};

}  // namespace tandem::parallel

#endif  // TANDEM_COMMON_PARALLEL_BLOCK_PASS_H_
