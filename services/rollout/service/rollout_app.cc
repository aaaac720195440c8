#include "services/rollout/service/rollout_app.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "common/base/errors/status_macros.h"
#include "common/base/machine/machine_resources.h"
#include "common/base/steady_time.h"
#include "services/rollout/service/convert.h"
#include "tandem/blobs/v1/blobs.grpc.pb.h"
#include "tandem/rollout/v1/rollout.grpc.pb.h"
#include "tandem/weights/v1/weights.grpc.pb.h"

namespace tandem::rollout {

RolloutApp::RolloutApp(const config::v1::RolloutServerConfig& config, rpc::ServerRuntime& runtime,
                       EngineFactory create_engine)
    : options_(ToEngineOptions(config, runtime.environment)),
      create_engine_(std::move(create_engine)),
      metrics_(runtime.metrics),
      rollout_service_(runtime,
                       RolloutServiceOptions{.tandem = options_.tandem,
                                             .max_batch_samples = options_.max_queue,
                                             .blob_cache_bytes = options_.blob_cache_bytes}),
      blob_service_(runtime.executor, rollout_service_.blobs()),
      weight_service_(runtime.executor, runtime.metrics) {}

std::vector<rpc::NamedService> RolloutApp::services() {
  if (!leads()) return {};  // clients call rank 0
  return {{v1::RolloutService::service_full_name(), &rollout_service_},
          {blobs::v1::BlobService::service_full_name(), &blob_service_},
          {weights::v1::WeightService::service_full_name(), &weight_service_}};
}

absl::Status RolloutApp::Load() {
  EngineOptions options = options_;
  options.free_memory.host = AvailableMemoryOfRank(options.environment);
  TANDEM_ASSIGN_OR_RETURN(engine_, create_engine_(options));
  rollout_service_.SetEngine(engine_.get());
  weight_service_.SetReceiver(&engine_->weights());
  metrics_.Gauge(rpc::metric::kQueueCapacity).Set(static_cast<double>(options_.max_queue));
  return absl::OkStatus();
}

absl::Status RolloutApp::CheckHealth() { return engine_->Health(); }

void RolloutApp::UpdateMetrics() {
  namespace metric = rpc::metric;
  const EngineStats stats = engine_->Stats();
  const auto set = [this](const rpc::MetricSpec& spec, int64_t value,
                          const std::vector<std::string>& labels = {}) {
    metrics_.Gauge(spec, labels).Set(static_cast<double>(value));
  };
  const auto total = [this](const rpc::MetricSpec& spec, int64_t value,
                            const std::vector<std::string>& labels = {}) {
    metrics_.SetTotal(spec, static_cast<double>(value), labels);
  };
  const absl::Time last_progress = absl::Now() - (SteadyTime::Now() - stats.last_progress);
  metrics_.Gauge(metric::kLastProgress)
      .Set(std::max(0.0, absl::ToDoubleSeconds(last_progress - absl::UnixEpoch())));
  if (!leads()) return;  // rank 0 alone has counters, and receives weights
  engine_->weights().DropAbandoned(SteadyTime::Now());
  rpc::UpdateBlobMetrics(rollout_service_.blobs(), metrics_);
  set(metric::kSequencesRunning, stats.sequences_running);
  set(metric::kSequencesWaiting, stats.sequences_waiting);
  set(metric::kGenerateStreams, rollout_service_.open_streams());
  set(metric::kKvTokens, stats.senior_kv_tokens, {"senior"});
  set(metric::kKvTokens, stats.junior_kv_tokens, {"junior"});
  set(metric::kKvCapacity, stats.kv_capacity_tokens);
  set(metric::kPaused, stats.paused ? 1 : 0);
  set(metric::kWeightsVersion, engine_->weights().Version().version);
  if (const auto speculator = engine_->weights().ComponentVersion(kSpeculatorComponent)) {
    set(metric::kSpeculatorVersion, speculator->version);
  }
  total(metric::kTokensGenerated, stats.senior_tokens_total, {"senior"});
  total(metric::kTokensGenerated, stats.junior_tokens_total, {"junior"});
  total(metric::kHandoffs, stats.handoffs_total);
  total(metric::kCatchUpTokens, stats.senior_catch_up_tokens_total, {"senior"});
  total(metric::kCatchUpTokens, stats.junior_catch_up_tokens_total, {"junior"});
  total(metric::kPromptTokens, stats.prompt_tokens_total);
  total(metric::kPrefixCacheTokens, stats.shared_prefix_tokens_total);
  total(metric::kPreemptions, stats.preemptions_total);
  for (const auto& [method, drafts] : {std::pair("ngram", &stats.ngram_drafts_total),
                                       std::pair("junior", &stats.junior_drafts_total),
                                       std::pair("heads", &stats.heads_drafts_total)}) {
    for (size_t i = 0; i < drafts->by_position.size(); ++i) {
      const DraftCounts& counts = drafts->by_position[i];
      // The first position always, so that a rate begins at 0; the others once they are used.
      if (i > 0 && counts.drafted == 0) break;
      const std::vector<std::string> labels = {method, absl::StrCat(i + 1)};
      total(metric::kDraftTokens, counts.drafted, labels);
      total(metric::kAcceptedDraftTokens, counts.accepted, labels);
    }
  }
  total(metric::kForwardPasses, stats.forward_passes_total + stats.score_passes_total);
}

void RolloutApp::Drain(SteadyTime) { rollout_service_.Drain(); }

void RolloutApp::Stop() {
  if (engine_ != nullptr) engine_->Shutdown();
}

}  // namespace tandem::rollout
