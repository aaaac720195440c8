// A model without its head: what a family implements.
#ifndef TANDEM_COMMON_MODEL_BACKBONE_H_
#define TANDEM_COMMON_MODEL_BACKBONE_H_

#include <ATen/core/Tensor.h>

#include "common/model/attention_context.h"
#include "common/model/ragged_batch.h"

namespace tandem {

class Backbone {
 public:
  virtual ~Backbone() = default;

  // Hidden states after the final norm: [T, H], or only those of `rows` ([R] int64) if defined.
  virtual at::Tensor HiddenStates(const RaggedBatch& batch, AttentionContext& context,
                                  const at::Tensor& rows) const = 0;
};

}  // namespace tandem

#endif  // TANDEM_COMMON_MODEL_BACKBONE_H_
