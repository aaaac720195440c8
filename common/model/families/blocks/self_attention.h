// The attention of a decoder layer, up to its output projection.
#ifndef TANDEM_COMMON_MODEL_FAMILIES_BLOCKS_SELF_ATTENTION_H_
#define TANDEM_COMMON_MODEL_FAMILIES_BLOCKS_SELF_ATTENTION_H_

#include <ATen/core/Tensor.h>

#include "common/model/passes/backbone.h"

namespace tandem {

class SelfAttention {
 public:
  virtual ~SelfAttention() = default;

  // Returns what this rank's heads attend to, [T, heads * width of a value], for all tokens' hidden
  // states x [T, H], normalised as the layer says. The layer's output projection follows.
  virtual at::Tensor Attend(const at::Tensor& x, const ModelPass& pass) const = 0;
};

}  // namespace tandem

#endif  // TANDEM_COMMON_MODEL_FAMILIES_BLOCKS_SELF_ATTENTION_H_
