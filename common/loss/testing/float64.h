// For tests: comparisons with oracles in float64.
#ifndef TANDEM_COMMON_LOSS_TESTING_FLOAT64_H_
#define TANDEM_COMMON_LOSS_TESTING_FLOAT64_H_

#include <ATen/ATen.h>

#include <vector>

namespace tandem::loss {

inline at::Tensor Vector(const std::vector<double>& v) { return at::tensor(v, at::kDouble); }

inline double MaxDifference(const at::Tensor& a, const at::Tensor& b) {
  return (a.to(at::kDouble) - b.to(at::kDouble)).abs().max().item<double>();
}

}  // namespace tandem::loss

#endif  // TANDEM_COMMON_LOSS_TESTING_FLOAT64_H_
