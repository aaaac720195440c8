#include "services/training_core/service/training_service.h"

#include <string>

#include "common/base/logging.h"
#include "common/optim/learning_rate.h"
#include "common/rpc/convert/proto_convert.h"
#include "common/rpc/metrics/phase_timer.h"
#include "common/rpc/server/server_info.h"
#include "services/training_core/service/optimizer_config.h"

namespace tandem::training {

TrainingService::TrainingService(const ServiceOptions& options, const rpc::ServerRuntime& runtime)
    : options_(options),
      runtime_(runtime),
      executor_(runtime.executor),
      metrics_(runtime.metrics),
      budget_(options.max_buffered_bytes),
      blob_service_(runtime.executor, blobs_) {
  // Counters and gauges exist from the start, for alerts.
  for (const char* result : {"applied", "skipped", "not_finite", "replayed", "failed"}) {
    metrics_.Counter(rpc::metric::kTrainSteps, {result});
  }
  metrics_.Counter(rpc::metric::kTrainedTokens);
  for (const char* result : {"ok", "failed"}) metrics_.Counter(rpc::metric::kCheckpoints, {result});
  metrics_.Gauge(rpc::metric::kCheckpointTime);
  metrics_.Gauge(rpc::metric::kCheckpointBytes);
  metrics_.Gauge(rpc::metric::kLastProgress);
}

void TrainingService::SetEngine(Engine* engine) {
  engine_ = engine;
  if (engine->Info().model.vision.has_value()) blobs_.SetCapacity(options_.blob_cache_bytes);
}

types::v1::ServerInfo TrainingService::ServerInfo() const {
  const EngineInfo info = engine_->Info();
  types::v1::ServerInfo server = rpc::DescribeServer(runtime_, options_.role);
  rpc::WeightsVersionToProto(info.weights, server.mutable_weights());
  rpc::ModelSummaryToProto(info.model, server.mutable_model());
  return server;
}

void TrainingService::UpdateMetrics() {
  const EngineInfo info = engine_->Info();
  metrics_.Gauge(rpc::metric::kWeightsVersion).Set(static_cast<double>(info.weights.version));
  metrics_.Gauge(rpc::metric::kOptimizerSteps).Set(static_cast<double>(info.optimizer_steps));
  rpc::UpdateBlobMetrics(blobs_, metrics_);
}

void TrainingService::OnCheckpoint(const CheckpointReport& report) {
  metrics_.Histogram(rpc::metric::kStepSeconds, {"save"}).Observe(report.held_seconds);
  if (report.written_seconds > 0) {
    metrics_.Histogram(rpc::metric::kStepSeconds, {"write"}).Observe(report.written_seconds);
  }
  metrics_.Counter(rpc::metric::kCheckpoints, {report.saved.ok() ? "ok" : "failed"}).Increment();
  if (!report.saved.ok()) {
    Log(LogLevel::kError, "checkpoint_failed", {{"error", report.saved.status().ToString()}});
    return;
  }
  metrics_.Gauge(rpc::metric::kCheckpointTime).SetToCurrentTime();
  metrics_.Gauge(rpc::metric::kCheckpointBytes).Set(static_cast<double>(report.saved->bytes));
  Log(LogLevel::kInfo, "checkpoint_saved",
      {{"path", report.saved->path},
       {"bytes", report.saved->bytes},
       {"held_seconds", report.held_seconds},
       {"written_seconds", report.written_seconds}});
}

absl::StatusOr<StepResult> TrainingService::RunStep(
    const StepIdentity& identity, absl::FunctionRef<int64_t(const StepReport&)> num_tokens,
    absl::FunctionRef<absl::StatusOr<StepResult>()> run) {
  rpc::PhaseTimer timer(metrics_, "train");
  absl::StatusOr<StepResult> result = run();
  const double seconds = timer.Stop();
  if (!result.ok()) {
    metrics_.Counter(rpc::metric::kTrainSteps, {"failed"}).Increment();
    Log(LogLevel::kWarning, "train_step_failed",
        {{"run_id", identity.run_id},
         {"step", identity.step},
         {"error", result.status().ToString()}});
    return result;
  }
  if (result->replayed) {
    metrics_.Counter(rpc::metric::kTrainSteps, {"replayed"}).Increment();
    return result;
  }
  const StepReport& report = result->report;
  UpdateMetrics();
  const char* const skipped = result->not_finite ? "not_finite" : "skipped";
  metrics_.Counter(rpc::metric::kTrainSteps, {report.skipped ? skipped : "applied"}).Increment();
  if (!report.skipped) {
    metrics_.Counter(rpc::metric::kTrainedTokens)
        .Increment(static_cast<double>(num_tokens(report)));
  }
  metrics_.Gauge(rpc::metric::kLastProgress).SetToCurrentTime();
  metrics_.SetReport(report.metrics);
  Log(LogLevel::kInfo, "train_step",
      {{"run_id", report.run_id},
       {"step", report.step},
       {"version", report.weights.version},
       {"skipped", report.skipped},
       {"skip_reason", report.skip_reason},
       {"seconds", seconds}});
  return result;
}

config::v1::OptimizerInfo DescribeOptimizer(const config::v1::OptimizerOptions& options,
                                            int64_t updates) {
  config::v1::OptimizerInfo info;
  *info.mutable_options() = options;
  info.set_updates(updates);
  info.set_next_learning_rate(LearningRateAt(ToOptimizerOptions(options), updates));
  return info;
}

void ShutDownEngine(Engine& engine, const std::string& directory) {
  if (!directory.empty() && engine.unsaved()) {
    const absl::StatusOr<checkpoint::Saved> saved =
        engine.SaveCheckpoint({}, {.directory = directory, .name = "shutdown"});
    if (!saved.ok()) {
      Log(LogLevel::kError, "shutdown_checkpoint_failed",
          {{"directory", directory}, {"error", saved.status().ToString()}});
    }
  }
  engine.Shutdown();
}

}  // namespace tandem::training
