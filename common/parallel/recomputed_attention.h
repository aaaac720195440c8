// Attention that is computed a second time in the backward pass.
#ifndef TANDEM_COMMON_PARALLEL_RECOMPUTED_ATTENTION_H_
#define TANDEM_COMMON_PARALLEL_RECOMPUTED_ATTENTION_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <utility>

#include "common/model/attention_context.h"

namespace tandem::parallel {

// Keeps of an attention its q, k and v, whatever the context inside would keep. It and the batch
// must outlive the backward pass.
class RecomputedAttention : public AttentionContext {
 public:
  explicit RecomputedAttention(std::unique_ptr<AttentionContext> inside)
      : inside_(std::move(inside)) {}

  at::Tensor Attend(int64_t layer, const RaggedBatch& batch, const at::Tensor& q,
                    const at::Tensor& k, const at::Tensor& v) override;

 private:
  const std::unique_ptr<AttentionContext> inside_;
};

}  // namespace tandem::parallel

#endif  // TANDEM_COMMON_PARALLEL_RECOMPUTED_ATTENTION_H_
