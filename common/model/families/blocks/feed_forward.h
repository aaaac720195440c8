// The feed-forward network of a decoder layer.
#ifndef TANDEM_COMMON_MODEL_FAMILIES_BLOCKS_FEED_FORWARD_H_
#define TANDEM_COMMON_MODEL_FAMILIES_BLOCKS_FEED_FORWARD_H_

#include <ATen/core/Tensor.h>

#include "common/model/passes/backbone.h"

namespace tandem {

class FeedForward {
 public:
  virtual ~FeedForward() = default;

  // Returns residual + f(x), or f(x) if `residual` is undefined, for all tokens' hidden states x
  // [T, H], normalised as the layer says. The result and `residual`, which may be overwritten
  // without autograd, are as sharded as the residual of the pass.
  virtual at::Tensor Forward(const at::Tensor& x, const at::Tensor& residual,
                             const ModelPass& pass) const = 0;
};

}  // namespace tandem

#endif  // TANDEM_COMMON_MODEL_FAMILIES_BLOCKS_FEED_FORWARD_H_
