#include "services/training/service/strategy_config.h"

#include <string>

#include "absl/time/time.h"
#include "common/base/rank_environment.h"
#include "common/base/status_macros.h"
#include "common/base/strategy_name.h"

namespace tandem::training {
namespace {

parallel::Recompute ToRecompute(const std::string& granularity) {
  if (granularity == "full") return parallel::Recompute::kFull;
  if (granularity == "selective") return parallel::Recompute::kSelective;
  return parallel::Recompute::kNone;
}

MemoryShares SharesOf(const parallel::ZeroOptions& zero, int64_t ranks) {
  // The last block that ran, the one that runs, and the next one.
  return {.weights = zero.stage == 3 ? ranks : 1,
          .gradients = zero.stage >= 2 ? ranks : 1,
          .optimizer = ranks,
          .gathered_blocks = zero.stage == 3 ? 3 : 0};
}

MemoryShares SharesOf(const parallel::MegatronOptions& megatron, int64_t ranks) {
  const int64_t parts = megatron.tensor_model_parallel_size * megatron.pipeline_model_parallel_size;
  // A stage has as many micro-batches under way as there are stages.
  return {.weights = parts,
          .gradients = parts,
          .optimizer = megatron.use_distributed_optimizer ? ranks : parts,
          .activations = megatron.tensor_model_parallel_size * megatron.context_parallel_size};
}

}  // namespace

parallel::StrategyOptions ToStrategyOptions(const config::v1::StrategyOptions& config) {
  const parallel::Recompute recompute = ToRecompute(config.recompute_granularity());
  parallel::StrategyOptions options;
  options.name = config.name();
  options.single = {.recompute_granularity = recompute};
  options.zero = {.stage = config.stage(),
                  .overlap_comm = config.overlap_comm(),
                  .offload_optimizer = config.offload_optimizer(),
                  .reduce_bucket_size = config.reduce_bucket_size(),
                  .allgather_bucket_size = config.allgather_bucket_size(),
                  .recompute_granularity = recompute};
  options.megatron = {
      .tensor_model_parallel_size = config.tensor_model_parallel_size(),
      .pipeline_model_parallel_size = config.pipeline_model_parallel_size(),
      .context_parallel_size = config.context_parallel_size(),
      .expert_model_parallel_size = config.expert_model_parallel_size(),
      .virtual_pipeline_model_parallel_size = config.virtual_pipeline_model_parallel_size(),
      .use_distributed_optimizer = config.use_distributed_optimizer(),
      .recompute_granularity = recompute};
  return options;
}

parallel::RankTimeouts ToRankTimeouts(const config::v1::StrategyOptions& config) {
  return {.collective = absl::Seconds(config.collective_timeout_seconds()),
          .silence = absl::Seconds(config.heartbeat_timeout_seconds())};
}

absl::StatusOr<MemoryShares> CheckLayout(const config::v1::StrategyOptions& config,
                                         const ModelConfig& model, HeadKind head) {
  TANDEM_ASSIGN_OR_RETURN(const RankEnvironment environment, ReadRankEnvironment());
  const int64_t ranks = environment.world_size;
  const parallel::StrategyOptions options = ToStrategyOptions(config);
  if (options.name == "zero") return SharesOf(options.zero, ranks);
  if (options.name == "megatron") {
    TANDEM_RETURN_IF_ERROR(parallel::CheckMegatronOptions(options.megatron, model, head, ranks));
    return SharesOf(options.megatron, ranks);
  }
  TANDEM_RETURN_IF_ERROR(CheckSingleRank(ranks));
  return MemoryShares{};
}

}  // namespace tandem::training
