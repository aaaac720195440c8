#include "common/rpc/metrics/metrics.h"

#include <cassert>
#include <limits>
#include <utility>

#include "prometheus/family.h"
#include "prometheus/text_serializer.h"

namespace tandem::rpc {
namespace {

// Seconds, from a cheap call to a long train step.
const prometheus::Histogram::BucketBoundaries kSecondsBuckets = {
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600};

prometheus::Labels MakeLabels(const MetricSpec& spec, const std::vector<std::string>& values) {
  assert(values.size() == spec.num_labels());
  prometheus::Labels labels;
  for (size_t i = 0; i < values.size() && i < spec.num_labels(); ++i) {
    labels.emplace(spec.labels[i], values[i]);
  }
  return labels;
}

}  // namespace

// Refreshes, then collects.
class Metrics::Source : public prometheus::Collectable {
 public:
  explicit Source(std::shared_ptr<prometheus::Registry> registry)
      : registry_(std::move(registry)) {}

  std::vector<prometheus::MetricFamily> Collect() const override {
    {
      std::lock_guard lock(mutex_);
      if (update_) update_();
    }
    return registry_->Collect();
  }
  void SetUpdate(std::function<void()> update) {
    std::lock_guard lock(mutex_);
    update_ = std::move(update);
  }

 private:
  const std::shared_ptr<prometheus::Registry> registry_;
  mutable std::mutex mutex_;
  std::function<void()> update_;
};

Metrics::Metrics()
    : registry_(std::make_shared<prometheus::Registry>()),
      source_(std::make_shared<Source>(registry_)) {}

Metrics::~Metrics() { source_->SetUpdate(nullptr); }

prometheus::Counter& Metrics::Counter(const MetricSpec& spec,
                                      const std::vector<std::string>& labels) {
  return prometheus::BuildCounter()
      .Name(spec.name)
      .Help(spec.help)
      .Register(*registry_)
      .Add(MakeLabels(spec, labels));
}

prometheus::Gauge& Metrics::Gauge(const MetricSpec& spec, const std::vector<std::string>& labels) {
  return prometheus::BuildGauge()
      .Name(spec.name)
      .Help(spec.help)
      .Register(*registry_)
      .Add(MakeLabels(spec, labels));
}

prometheus::Histogram& Metrics::Histogram(const MetricSpec& spec,
                                          const std::vector<std::string>& labels) {
  return prometheus::BuildHistogram()
      .Name(spec.name)
      .Help(spec.help)
      .Register(*registry_)
      .Add(MakeLabels(spec, labels), kSecondsBuckets);
}

void Metrics::SetTotal(const MetricSpec& spec, double total,
                       const std::vector<std::string>& labels) {
  prometheus::Counter& counter = Counter(spec, labels);
  std::lock_guard lock(mutex_);
  if (const double step = total - counter.Value(); step > 0) counter.Increment(step);
}

void Metrics::SetReport(const std::map<std::string, double>& report) {
  for (const ReportMetric& metric : kReportMetrics) {
    const auto found = report.find(metric.name);
    const bool given = found != report.end();
    {
      std::lock_guard lock(mutex_);
      if (given) reported_.insert(metric.name);
      if (!reported_.contains(metric.name)) continue;
    }
    const std::string name = PrometheusName(metric.name);
    Gauge(MetricSpec{MetricType::kGauge, name.c_str(), metric.help})
        .Set(given ? found->second : std::numeric_limits<double>::quiet_NaN());
  }
}

void Metrics::OnScrape(std::function<void()> update) { source_->SetUpdate(std::move(update)); }

std::string Metrics::Text() { return prometheus::TextSerializer().Serialize(source_->Collect()); }

}  // namespace tandem::rpc
