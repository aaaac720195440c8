// Attention that is computed again in the backward pass (Recompute::kSelective).
#ifndef TANDEM_COMMON_PARALLEL_MEMORY_RECOMPUTED_ATTENTION_H_
#define TANDEM_COMMON_PARALLEL_MEMORY_RECOMPUTED_ATTENTION_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <utility>

#include "common/model/passes/attention_context.h"

namespace tandem::parallel {

// Wraps an attention context and keeps q, k and v alone, whatever the wrapped context would keep.
// Must outlive the backward pass, as must the batch.
class RecomputedAttention : public AttentionContext {
 public:
  explicit RecomputedAttention(std::unique_ptr<AttentionContext> inside)
      : inside_(std::move(inside)) {}

  at::Tensor Attend(const AttentionLayer& layer, const RaggedBatch& batch, const at::Tensor& q,
                    const at::Tensor& k, const at::Tensor& v) override;
  at::Tensor SumOverRanks(const at::Tensor& values) override {
    return inside_->SumOverRanks(values);
  }

 private:
  const std::unique_ptr<AttentionContext> inside_;
};

}  // namespace tandem::parallel

#endif  // TANDEM_COMMON_PARALLEL_MEMORY_RECOMPUTED_ATTENTION_H_
