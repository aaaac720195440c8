#include "services/trainer/service/memory.h"

#include <utility>
#include <vector>

#include "common/base/status_macros.h"
#include "common/model/model_config.h"
#include "common/rpc/compute_config.h"
#include "services/trainer/engine/types.h"
#include "services/training/service/strategy_config.h"

namespace tandem::trainer {

absl::StatusOr<MemoryPlan> PlanMemory(const config::v1::TrainerServerConfig& config) {
  TANDEM_ASSIGN_OR_RETURN(const ModelConfig model, rpc::ConfiguredModel("model", config.model()));
  TANDEM_ASSIGN_OR_RETURN(const MemoryShares shares,
                          training::CheckLayout(config.strategy(), model, HeadKind::kLm));
  std::vector<FrozenModel> frozen;
  if (!config.reference_model().empty()) {
    TANDEM_ASSIGN_OR_RETURN(ModelConfig reference,
                            rpc::ConfiguredModel("reference_model", config.reference_model()));
    frozen.push_back({"reference", std::move(reference)});
  }
  if (!config.junior_model().empty()) {
    TANDEM_ASSIGN_OR_RETURN(ModelConfig junior,
                            rpc::ConfiguredModel("junior_model", config.junior_model()));
    frozen.push_back({"junior", std::move(junior)});
  }
  const int64_t logits_chunk_bytes =
      LogitsChunkBytes(config.batch().logits_chunk_bytes(), model.vocab_size);
  // The KL towards the junior has a buffer of its own.
  const int64_t buffers = config.junior_model().empty() ? 1 : 2;
  return TrainingMemoryPlan(model, {.freeze = {config.freeze().begin(), config.freeze().end()},
                                    .frozen = std::move(frozen),
                                    .micro_batch_tokens = config.batch().micro_batch_tokens(),
                                    .max_model_len = config.max_model_len(),
                                    .logits_chunk_bytes = buffers * logits_chunk_bytes,
                                    .dtype = rpc::ComputeType(config.compute()),
                                    .shares = shares});
}

}  // namespace tandem::trainer
