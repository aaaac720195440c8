// Ring attention (https://arxiv.org/abs/2310.01889): causal attention of sequences whose tokens lie
// on several ranks. Keys and values travel round the ring of ranks while each rank attends to those
// that it has.
#ifndef TANDEM_COMMON_PARALLEL_CONTEXT_RING_ATTENTION_H_
#define TANDEM_COMMON_PARALLEL_CONTEXT_RING_ATTENTION_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

#include "common/model/passes/attention_context.h"
#include "common/parallel/context/context_shard.h"
#include "common/ranks/communicator.h"

namespace tandem::parallel {

class Ring;

// The attention context of passes over `shard.batch`, on all ranks of the shard's group. Keys
// travel round the whole ring even where a window hides all of them from a rank. Attend and its
// backward pass are collective, with n steps and 3 (n-1) sends on every rank, whatever its number
// of rows; either all ranks want gradients or none does. Throws c10::Error as the communicator
// does.
//
// The backward pass keeps q, k, v, the output and one number for each row and head; no
// probabilities. Softmax and sums are float32 (float64 for float64).
//
// A rank r of n sends for each layer, with t_i the rows of rank i, T their sum, and
// w = key_value_heads * (head_dim + value_dim), or key_value_heads * head_dim where values are
// columns of the keys (AttentionLayer::values_in_keys):
//   forward   k, v    w (T - t_{r+1}) numbers in the type of q   (all rows but those of r + 1)
//   backward  k, v    the same again
//             dk, dv  w (T - t_r) numbers in float32 (float64)   (all rows but its own)
// So forward (n-1)/n w T numbers where the rows divide evenly, and three times that in all.
class RingContext : public AttentionContext {
 public:
  RingContext(std::shared_ptr<ranks::Communicator> communicator, const ContextShard& shard);

  // `batch` is shard.batch. Differentiable.
  at::Tensor Attend(const AttentionLayer& layer, const RaggedBatch& batch, const at::Tensor& q,
                    const at::Tensor& k, const at::Tensor& v) override;
  at::Tensor SumOverRanks(const at::Tensor& values) override;

 private:
  const std::shared_ptr<ranks::Communicator> communicator_;
  const std::shared_ptr<Ring> ring_;
};

}  // namespace tandem::parallel

#endif  // TANDEM_COMMON_PARALLEL_CONTEXT_RING_ATTENTION_H_
