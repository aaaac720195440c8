#include "common/speculator/heads/recurrence.h"

#include <ATen/ATen.h>

#include <cmath>
#include <numbers>

namespace tandem::speculator {
namespace {

constexpr double kEpsilon = 1e-6;

at::Tensor Normalize(const at::Tensor& x) {
  return x * (x.square().mean(/*dim=*/-1, /*keepdim=*/true) + kEpsilon).rsqrt();
}

}  // namespace

double EmbeddingFactor(int64_t n_predict, int64_t width) {
  const double state = std::pow(0.5, 0.5 / static_cast<double>(n_predict));
  return std::sqrt((1 - state * state) * (static_cast<double>(width) / 2)) / state;
}

at::Tensor Normalize(const at::Tensor& x, const NormWeights& weights) {
  return at::addcmul(weights.bias, Normalize(x), weights.weight);
}

at::Tensor FirstState(const at::Tensor& hidden, at::ScalarType dtype, bool scale_input) {
  const at::Tensor state = hidden.to(dtype);
  return scale_input ? Normalize(state) / std::numbers::sqrt2 : state;
}

}  // namespace tandem::speculator
