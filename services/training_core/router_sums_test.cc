#include "services/training_core/router_sums.h"

#include <gtest/gtest.h>

#include <map>
#include <string>

namespace tandem::training {
namespace {

// Six tokens, two experts each, in two layers.
RouterSums SomeSums() {
  return {.loads = {{3, 3, 6}, {2, 8, 2}}, .experts_per_token = 2, .load_balancing = 30, .z = 6};
}

TEST(RouterSumsTest, MetricsAreMeansOverTokensAndLayers) {
  std::map<std::string, double> metrics;
  AddRouterMetrics(SomeSums(), "critic/router_", metrics);
  EXPECT_EQ(metrics.size(), 3U);
  EXPECT_DOUBLE_EQ(metrics.at("critic/router_aux_loss"), 30.0 / 12);
  EXPECT_DOUBLE_EQ(metrics.at("critic/router_z_loss"), 6.0 / 12);
  EXPECT_DOUBLE_EQ(metrics.at("critic/router_max_load_ratio"), 8.0 / 4);
}

TEST(RouterSumsTest, UpdatesAddUp) {
  RouterSums sums;
  sums.Add(SomeSums());
  RouterSums other = SomeSums();
  other.loads = {{9, 3, 0}, {4, 4, 4}};
  other.z = 18;
  sums.Add(other);
  EXPECT_EQ(sums.loads, (std::vector<std::vector<double>>{{12, 6, 6}, {6, 12, 6}}));
  EXPECT_DOUBLE_EQ(sums.choices(), 24);
  EXPECT_DOUBLE_EQ(sums.Loss({.load_balancing = 0.1, .z = 0.01}), 0.1 * 60 / 24 + 0.01 * 24 / 24);
}

TEST(RouterSumsTest, AModelWithoutExpertsReportsNothing) {
  std::map<std::string, double> metrics;
  AddRouterMetrics({}, "router/", metrics);
  EXPECT_TRUE(metrics.empty());
  EXPECT_EQ(RouterSums{}.Loss({.load_balancing = 1, .z = 1}), 0);
}

}  // namespace
}  // namespace tandem::training
