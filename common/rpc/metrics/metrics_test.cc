#include "common/rpc/metrics/metrics.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <vector>

#include "common/rpc/metrics/process_metrics.h"

namespace tandem::rpc {
namespace {

using testing::HasSubstr;

TEST(MetricNamesTest, ReportNamesBecomePrometheusNames) {
  EXPECT_EQ(PrometheusName("loss/total"), "tandem_loss");
  EXPECT_EQ(PrometheusName("tandem/switches_per_seq"), "tandem_switches_per_seq");
}

TEST(MetricsTest, ValuesAppearInTheText) {
  Metrics metrics;
  metrics.Counter(metric::kTokensGenerated, {"junior"}).Increment(3);
  metrics.Gauge(metric::kWeightsVersion).Set(7);
  metrics.Histogram(metric::kStepSeconds, {"train"}).Observe(0.2);
  metrics.SetReport({{"loss/total", 0.5}, {"unheard/of", 1}});
  const std::string text = metrics.Text();
  EXPECT_THAT(text, HasSubstr("tandem_generated_tokens_total{author=\"junior\"} 3"));
  EXPECT_THAT(text, HasSubstr("tandem_weights_version 7"));
  EXPECT_THAT(text, HasSubstr("tandem_step_seconds_count{phase=\"train\"} 1"));
  EXPECT_THAT(text, HasSubstr("tandem_loss 0.5"));
  EXPECT_THAT(text, testing::Not(HasSubstr("unheard")));
}

TEST(MetricsTest, AReportDoesNotShowWhatAnEarlierOneTold) {
  Metrics metrics;
  metrics.SetReport({{"loss/total", 0.5}, {"loss/policy", 0.25}});
  metrics.SetReport({{"loss/total", 0.75}});
  const std::string text = metrics.Text();
  EXPECT_THAT(text, HasSubstr("tandem_loss 0.75"));
  EXPECT_THAT(text, HasSubstr("tandem_loss_policy Nan"));
  EXPECT_THAT(text, testing::Not(HasSubstr("tandem_loss_kl")));
}

// Returns by how many bytes the resident memory grows when 64 MiB are touched.
double GrowthOfTouchedMemory() {
  Metrics metrics;
  UpdateProcessMetrics(metrics);
  const double before = metrics.Gauge(metric::kResidentMemory).Value();
  constexpr size_t kBytes = size_t{64} << 20;
  void* const mapped =
      mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) return 0;
  std::memset(mapped, 1, kBytes);
  UpdateProcessMetrics(metrics);
  return metrics.Gauge(metric::kResidentMemory).Value() - before;
}

TEST(ProcessMetricsTest, MemoryThatIsTouchedShows) {
  // In a process of its own: in this one memory of earlier tests may be given back meanwhile.
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(std::exit(GrowthOfTouchedMemory() > 60e6 ? 0 : 1), testing::ExitedWithCode(0), "");
}

TEST(ProcessMetricsTest, WorkAndFilesOfTheProcessShow) {
  Metrics metrics;
  UpdateProcessMetrics(metrics);
  EXPECT_GT(metrics.Counter(metric::kCpuSeconds).Value(), 0);
  EXPECT_GT(metrics.Gauge(metric::kOpenFiles).Value(), 2);
  EXPECT_GT(metrics.Gauge(metric::kAvailableMemory).Value(), 0);
}

TEST(MetricsTest, TotalsOnlyRise) {
  Metrics metrics;
  metrics.SetTotal(metric::kHandoffs, 5);
  metrics.SetTotal(metric::kHandoffs, 4);
  metrics.SetTotal(metric::kHandoffs, 9);
  EXPECT_EQ(metrics.Counter(metric::kHandoffs).Value(), 9);
}

TEST(MetricsTest, ScrapeRefreshesFirst) {
  Metrics metrics;
  metrics.OnScrape([&] { metrics.Gauge(metric::kWeightsVersion).Increment(); });
  EXPECT_THAT(metrics.Text(), HasSubstr("tandem_weights_version 1"));
  EXPECT_THAT(metrics.Text(), HasSubstr("tandem_weights_version 2"));
}

}  // namespace
}  // namespace tandem::rpc
