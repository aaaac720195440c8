// The arithmetic that the recurrent kinds share (https://arxiv.org/abs/2404.19124).
#ifndef TANDEM_COMMON_SPECULATOR_HEADS_RECURRENCE_H_
#define TANDEM_COMMON_SPECULATOR_HEADS_RECURRENCE_H_

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace tandem::speculator {

// Returns the factor e / s of a token's embedding of that width beside the projected state, with
// s = 0.5^(0.5 / n_predict) and e = sqrt((1 - s^2) width / 2): the first state keeps half of the
// expected magnitude at the last head.
double EmbeddingFactor(int64_t n_predict, int64_t width);

// A norm of root mean square with a bias.
struct NormWeights {
  at::Tensor weight;  // [m]
  at::Tensor bias;    // [m]
};

// Returns x / sqrt(mean(x^2) + 1e-6) weight + bias over the last dimension of x [N, m].
at::Tensor Normalize(const at::Tensor& x, const NormWeights& weights);

// Returns the state before step 0: `hidden` [N, d] in the type `dtype`; with `scale_input`
// normalised as above, without weights, and divided by sqrt(2).
at::Tensor FirstState(const at::Tensor& hidden, at::ScalarType dtype, bool scale_input);

}  // namespace tandem::speculator

#endif  // TANDEM_COMMON_SPECULATOR_HEADS_RECURRENCE_H_
