#include "common/rpc/metric_names.h"

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace tandem::rpc {
namespace {

constexpr const MetricSpec* kAll[] = {
    &metric::kRpcHandled,
    &metric::kRpcSeconds,
    &metric::kRpcLive,
    &metric::kServerReady,
    &metric::kServerInfo,
    &metric::kServerStart,
    &metric::kPolicyVersion,
    &metric::kLastProgress,
    &metric::kCallQueueDepth,
    &metric::kCallQueueCapacity,
    &metric::kSequencesRunning,
    &metric::kSequencesWaiting,
    &metric::kQueueCapacity,
    &metric::kGenerateStreams,
    &metric::kTokensGenerated,
    &metric::kPromptTokens,
    &metric::kHandoffs,
    &metric::kCatchUpTokens,
    &metric::kForwardPasses,
    &metric::kKvTokens,
    &metric::kKvCapacity,
    &metric::kPaused,
    &metric::kWeightBytesReceived,
    &metric::kWeightUpdates,
    &metric::kTrainSteps,
    &metric::kOptimizerSteps,
    &metric::kStepSeconds,
    &metric::kTrainedTokens,
    &metric::kCheckpointBytes,
    &metric::kCheckpointTime,
    &metric::kWeightBytesSent,
    &metric::kPublishResults,
};

const char* TypeName(MetricType type) {
  switch (type) {
    case MetricType::kCounter:
      return "counter";
    case MetricType::kGauge:
      return "gauge";
    case MetricType::kHistogram:
      return "histogram";
  }
  return "";
}

}  // namespace

std::string PrometheusName(absl::string_view report_name) {
  std::string name(report_name);
  for (char& c : name) {
    if (c == '/' || c == '-' || c == '.') c = '_';
  }
  return absl::StartsWith(name, "tandem_") ? name : absl::StrCat("tandem_", name);
}

std::span<const MetricSpec* const> AllMetrics() { return kAll; }

std::string MetricsMarkdown() {
  std::string text = "| name | type | labels | meaning |\n|---|---|---|---|\n";
  for (const MetricSpec* spec : kAll) {
    std::string labels;
    for (size_t i = 0; i < spec->num_labels(); ++i) {
      absl::StrAppend(&labels, i == 0 ? "" : ", ", "`", spec->labels[i], "`");
    }
    absl::StrAppend(&text, "| `", spec->name, "` | ", TypeName(spec->type), " | ", labels, " | ",
                    spec->help, " |\n");
  }
  for (const ReportMetric& metric : kReportMetrics) {
    absl::StrAppend(&text, "| `", PrometheusName(metric.name), "` | gauge |  | ", metric.help,
                    " |\n");
  }
  return text;
}

}  // namespace tandem::rpc
