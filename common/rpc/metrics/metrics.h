// The metrics of one server, on prometheus-cpp. Names come from metric_names.h.
#ifndef TANDEM_COMMON_RPC_METRICS_METRICS_H_
#define TANDEM_COMMON_RPC_METRICS_METRICS_H_

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "common/rpc/metrics/metric_names.h"
#include "prometheus/collectable.h"
#include "prometheus/counter.h"
#include "prometheus/gauge.h"
#include "prometheus/histogram.h"
#include "prometheus/registry.h"

namespace tandem::rpc {

// Thread-safe. Label values are given in the order of the spec; their number must match. Returned
// references live as long as this object.
class Metrics {
 public:
  Metrics();
  ~Metrics();

  prometheus::Counter& Counter(const MetricSpec& spec, const std::vector<std::string>& labels = {});
  prometheus::Gauge& Gauge(const MetricSpec& spec, const std::vector<std::string>& labels = {});
  prometheus::Histogram& Histogram(const MetricSpec& spec,
                                   const std::vector<std::string>& labels = {});

  // Raises a counter to `total`; for totals that an engine counts itself.
  void SetTotal(const MetricSpec& spec, double total, const std::vector<std::string>& labels = {});

  // Sets the gauges of a step report; names that are not in kReportMetrics are skipped. A metric
  // that only an earlier report had becomes NaN.
  void SetReport(const std::map<std::string, double>& report);

  // `update` runs before every scrape, to refresh gauges; nullptr ends that, and when this returns
  // no call of the earlier one is running.
  void OnScrape(std::function<void()> update);

  // The current values in the text format.
  std::string Text();

 private:
  class Source;
  std::shared_ptr<prometheus::Registry> registry_;
  std::shared_ptr<Source> source_;
  std::mutex mutex_;
  std::set<std::string> reported_;
};

}  // namespace tandem::rpc

#endif  // TANDEM_COMMON_RPC_METRICS_METRICS_H_
