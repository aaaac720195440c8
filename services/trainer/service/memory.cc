#include "services/trainer/service/memory.h"

#include <optional>

#include "common/base/status_macros.h"
#include "common/model/model_config.h"
#include "common/rpc/compute_config.h"

namespace tandem::trainer {

absl::StatusOr<MemoryPlan> PlanMemory(const config::v1::TrainerServerConfig& config) {
  TANDEM_ASSIGN_OR_RETURN(const ModelConfig model, rpc::ConfiguredModel("model", config.model()));
  std::optional<ModelConfig> reference;
  if (!config.reference_model().empty()) {
    TANDEM_ASSIGN_OR_RETURN(reference,
                            rpc::ConfiguredModel("reference_model", config.reference_model()));
  }
  return TrainingMemoryPlan(model, {.freeze = {config.freeze().begin(), config.freeze().end()},
                                    .reference = reference.has_value() ? &*reference : nullptr,
                                    .micro_batch_tokens = config.batch().micro_batch_tokens(),
                                    .max_model_len = config.max_model_len(),
                                    .logits_chunk_bytes = config.batch().logits_chunk_bytes(),
                                    .dtype = rpc::ComputeType(config.compute())});
}

}  // namespace tandem::trainer
