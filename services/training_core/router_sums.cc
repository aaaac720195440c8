#include "services/training_core/router_sums.h"

#include <algorithm>
#include <cstddef>
#include <numeric>

namespace tandem::training {
namespace {

double Sum(const std::vector<double>& loads) {
  return std::accumulate(loads.begin(), loads.end(), 0.0);
}

}  // namespace

double RouterSums::choices() const {
  double count = 0;
  for (const std::vector<double>& layer : loads) count += Sum(layer);
  return count / static_cast<double>(experts_per_token);
}

void RouterSums::Add(const RouterSums& other) {
  if (empty()) {
    *this = other;
    return;
  }
  for (size_t layer = 0; layer < loads.size(); ++layer) {
    for (size_t e = 0; e < loads[layer].size(); ++e) loads[layer][e] += other.loads[layer][e];
  }
  load_balancing += other.load_balancing;
  z += other.z;
}

double RouterSums::Loss(const RouterLossCoefficients& coefficients) const {
  if (empty()) return 0;
  return (coefficients.load_balancing * load_balancing + coefficients.z * z) / choices();
}

void AddRouterMetrics(const RouterSums& sums, const std::string& prefix,
                      std::map<std::string, double>& metrics) {
  if (sums.empty()) return;
  double max_load_ratio = 0;
  for (const std::vector<double>& layer : sums.loads) {
    const double mean = Sum(layer) / static_cast<double>(layer.size());
    max_load_ratio = std::max(max_load_ratio, *std::ranges::max_element(layer) / mean);
  }
  metrics[prefix + "aux_loss"] = sums.load_balancing / sums.choices();
  metrics[prefix + "z_loss"] = sums.z / sums.choices();
  metrics[prefix + "max_load_ratio"] = max_load_ratio;
}

}  // namespace tandem::training
