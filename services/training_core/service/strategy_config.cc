#include "services/training_core/service/strategy_config.h"

#include <algorithm>
#include <string>

#include "absl/time/time.h"
#include "common/base/errors/status_macros.h"
#include "common/base/machine/rank_environment.h"
#include "common/parallel/strategy_name.h"
#include "services/training_core/memory_settings.h"

namespace tandem::training {
namespace {

parallel::Recompute ToRecompute(const std::string& granularity) {
  if (granularity == "full") return parallel::Recompute::kFull;
  if (granularity == "selective") return parallel::Recompute::kSelective;
  return parallel::Recompute::kNone;
}

}  // namespace

parallel::StrategyOptions ToStrategyOptions(const config::v1::StrategyOptions& config) {
  parallel::StrategyOptions options;
  options.name = config.name();
  options.recompute_granularity = ToRecompute(config.recompute_granularity());
  options.zero = {.stage = config.stage(),
                  .overlap_comm = config.overlap_comm(),
                  .offload_optimizer = config.offload_optimizer(),
                  .reduce_bucket_size = config.reduce_bucket_size(),
                  .allgather_bucket_size = config.allgather_bucket_size()};
  options.megatron = {
      .tensor_model_parallel_size = config.tensor_model_parallel_size(),
      .pipeline_model_parallel_size = config.pipeline_model_parallel_size(),
      .context_parallel_size = config.context_parallel_size(),
      .expert_model_parallel_size = config.expert_model_parallel_size(),
      .virtual_pipeline_model_parallel_size = config.virtual_pipeline_model_parallel_size(),
      .use_distributed_optimizer = config.use_distributed_optimizer()};
  return options;
}

ranks::RankTimeouts ToRankTimeouts(const config::v1::StrategyOptions& config) {
  return {.collective = absl::Seconds(config.collective_timeout_seconds()),
          .silence = absl::Seconds(config.heartbeat_timeout_seconds())};
}

absl::StatusOr<MemoryPlan> PlanTraining(const config::v1::StrategyOptions& config,
                                        const parallel::TrainedModel& model,
                                        int64_t micro_batch_tokens, int64_t max_model_len,
                                        bool checkpoint_snapshot) {
  TANDEM_ASSIGN_OR_RETURN(const RankEnvironment environment, ReadRankEnvironment());
  const int64_t ranks = environment.world_size;
  const parallel::StrategyOptions options = ToStrategyOptions(config);
  if (options.name == "single") TANDEM_RETURN_IF_ERROR(CheckSingleRank(ranks));
  if (options.name == "megatron") {
    TANDEM_RETURN_IF_ERROR(
        parallel::CheckMegatronOptions(options.megatron, model.config, model.head, ranks));
  }
  const int64_t tokens = std::max(micro_batch_tokens, model.config.LongestSequence(max_model_len));
  TANDEM_ASSIGN_OR_RETURN(
      MemoryPlan plan, parallel::TrainingMemory(options, model, tokens, environment.rank, ranks));
  if (checkpoint_snapshot) {
    TANDEM_ASSIGN_OR_RETURN(const int64_t bytes,
                            parallel::CheckpointCopyBytes(options, model, plan, ranks));
    if (bytes > 0)
      plan.items.push_back({"checkpoint_snapshot", bytes, /*on_host=*/true,
                            "for checkpoints that are written beside the next steps"});
  }
  // GCC 12 sees wrong bounds in the assignment of the array.
  plan.remedy = std::string(kMemorySettings);
  return plan;
}

}  // namespace tandem::training
