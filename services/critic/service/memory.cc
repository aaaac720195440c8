#include "services/critic/service/memory.h"

#include "common/base/errors/status_macros.h"
#include "common/model/config/model_config.h"
#include "common/model/loading/peft_files.h"
#include "common/rpc/convert/compute_config.h"
#include "services/training_core/service/strategy_config.h"

namespace tandem::critic {

absl::StatusOr<MemoryPlan> PlanMemory(const config::v1::CriticServerConfig& config) {
  TANDEM_ASSIGN_OR_RETURN(const ModelConfig model, rpc::ConfiguredModel("model", config.model()));
  TANDEM_ASSIGN_OR_RETURN(const LoraOptions lora, ResolveLora(rpc::ToLoraOptions(config.lora())));
  TANDEM_ASSIGN_OR_RETURN(
      MemoryPlan plan,
      training::PlanTraining(config.strategy(),
                             {.config = model,
                              .head = HeadKind::kValue,
                              .untie_embeddings = config.untie_embeddings(),
                              .freeze = {config.freeze().begin(), config.freeze().end()},
                              .lora = lora,
                              .dtype = rpc::ComputeType(config.compute()),
                              .weight_dtype = rpc::WeightType(config.compute()),
                              .weight_format = rpc::FrozenFormat(config),
                              .activation_dtype = rpc::ActivationType(config.compute()),
                              .on_host = config.compute().device() == "cpu",
                              .shared_prefixes = config.batch().shared_prefixes(),
                              .product_rows = config.compute().product_rows()},
                             config.batch().micro_batch_tokens(), config.max_model_len(),
                             config.checkpoint_snapshot()));
  if (model.vision.has_value()) {
    plan.items.push_back({"blob_cache", config.server().blob_cache_bytes()});
  }
  return plan;
}

}  // namespace tandem::critic
