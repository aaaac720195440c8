// Converts the configuration of a trainer or critic into the plain struct of the engines. No gRPC.
#ifndef TANDEM_SERVICES_TRAINING_CORE_SERVICE_TRAINING_CONFIG_H_
#define TANDEM_SERVICES_TRAINING_CORE_SERVICE_TRAINING_CONFIG_H_

#include "common/base/machine/rank_environment.h"
#include "common/config/config.h"
#include "common/rpc/convert/compute_config.h"
#include "services/training_core/engine.h"
#include "services/training_core/service/optimizer_config.h"
#include "services/training_core/service/strategy_config.h"

namespace tandem::training {

// Sets the options that both configurations have; `config` must be resolved
// (common/config/server_config.h).
template <typename Config>
void SetTrainingOptions(const Config& config, const RankEnvironment& environment,
                        TrainingOptions* options) {
  options->model = config.model();
  options->strategy = ToStrategyOptions(config.strategy());
  options->rank_timeouts = ToRankTimeouts(config.strategy());
  options->optimizer = ToOptimizerOptions(config.optimizer());
  options->micro_batch_tokens = config.batch().micro_batch_tokens();
  options->shared_prefixes = config.batch().shared_prefixes();
  options->max_model_len = config.max_model_len();
  options->max_samples = config.max_samples();
  options->freeze.assign(config.freeze().begin(), config.freeze().end());
  options->lora = rpc::ToLoraOptions(config.lora());
  options->weight_format = rpc::FrozenFormat(config);
  options->router_losses = {.load_balancing = config.router_aux_loss_coef(),
                            .z = config.router_z_loss_coef()};
  options->checkpoint_snapshot = config.checkpoint_snapshot();
  options->compute = rpc::ToComputeOptions(config.compute());
  options->compute.local_rank = environment.local_rank;
  options->compute.local_world_size = environment.local_world_size;
  options->environment = environment;
  Config alike = config;
  alike.clear_server();  // may differ between ranks
  options->configuration = config::ToYaml(alike);
}

// Returns ServiceOptions::evaluation_tokens: some micro-batches of every rank.
template <typename Config>
int64_t EvaluationTokens(const Config& config, const RankEnvironment& environment) {
  constexpr int64_t kMicroBatches = 8;
  return kMicroBatches * config.batch().micro_batch_tokens() * environment.world_size;
}

}  // namespace tandem::training

#endif  // TANDEM_SERVICES_TRAINING_CORE_SERVICE_TRAINING_CONFIG_H_
