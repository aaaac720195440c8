// Operations of own kernels with gradients. The forward pass has the bits of inference.
#ifndef TANDEM_COMMON_OPS_AUTOGRAD_FUNCTIONS_H_
#define TANDEM_COMMON_OPS_AUTOGRAD_FUNCTIONS_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "common/kernels/gate_activation.h"
#include "common/ops/attention/attention_scores.h"
#include "common/ops/attention/sequence_tables.h"

namespace tandem::ops {

// Operations of ops.h with autograd: in fp32 on the CPU, where gradients do not depend on the
// number of threads, and on a GPU that has kernels for the operands (HasLayerKernels,
// AttendsByRow). Those with a soft cap on any device and in any floating-point type.

at::Tensor DifferentiableRmsNorm(const at::Tensor& x, const at::Tensor& weight, double eps,
                                 double offset);
// No gradient flows into cos and sin.
at::Tensor DifferentiableRotary(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin);
at::Tensor DifferentiableGated(const at::Tensor& gate_up, kernels::GateActivation activation);
// The backward pass computes the attention again, in ATen, rather than keep its softmax.
at::Tensor DifferentiableAttention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                   const std::vector<int64_t>& offsets,
                                   const AttentionScores& scores, const SequenceTables& tables);
at::Tensor DifferentiableSoftCap(const at::Tensor& x, double soft_cap);

}  // namespace tandem::ops

#endif  // TANDEM_COMMON_OPS_AUTOGRAD_FUNCTIONS_H_
