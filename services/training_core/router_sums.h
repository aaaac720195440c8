// Sums over the routers of a model with experts in the updates of a step: their losses, and the
// loads of the experts (common/model/passes/router_losses.h). No tensors.
#ifndef TANDEM_SERVICES_TRAINING_CORE_ROUTER_SUMS_H_
#define TANDEM_SERVICES_TRAINING_CORE_ROUTER_SUMS_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace tandem::training {

// Coefficients of the two losses in the loss of an update. Each loss is the mean over the tokens
// that the model reads in the update and over its layers with experts.
struct RouterLossCoefficients {
  double load_balancing = 0;
  double z = 0;
};

// Sums over all ranks. Empty for a model without experts.
struct RouterSums {
  // How often each expert was taken, one row for each layer with experts.
  std::vector<std::vector<double>> loads;
  int64_t experts_per_token = 0;
  // Sums over tokens and layers.
  double load_balancing = 0;
  double z = 0;

  bool empty() const { return loads.empty(); }
  // Number of choices that tokens made: tokens times layers.
  double choices() const;
  // Adds the sums of another update.
  void Add(const RouterSums& other);
  // Returns what both losses add to the loss, as a mean over the updates.
  double Loss(const RouterLossCoefficients& coefficients) const;
};

// Adds <prefix>aux_loss, <prefix>z_loss and <prefix>max_load_ratio, unless `sums` is empty.
void AddRouterMetrics(const RouterSums& sums, const std::string& prefix,
                      std::map<std::string, double>& metrics);

}  // namespace tandem::training

#endif  // TANDEM_SERVICES_TRAINING_CORE_ROUTER_SUMS_H_
