#ifndef TANDEM_COMMON_OPS_ATTENTION_ATTENTION_GRADIENTS_H_
#define TANDEM_COMMON_OPS_ATTENTION_ATTENTION_GRADIENTS_H_

#include <ATen/core/Tensor.h>

namespace tandem::ops {

// The gradients of the queries, keys and values of an attention.
struct AttentionGradients {
  at::Tensor q, k, v;
};

}  // namespace tandem::ops

#endif  // TANDEM_COMMON_OPS_ATTENTION_ATTENTION_GRADIENTS_H_
