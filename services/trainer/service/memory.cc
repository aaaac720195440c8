#include "services/trainer/service/memory.h"

#include <optional>
#include <string>
#include <vector>

#include "common/base/errors/error.h"
#include "common/base/errors/status_macros.h"
#include "common/base/machine/rank_environment.h"
#include "common/model/config/model_config.h"
#include "common/model/config/parameter_spec.h"
#include "common/model/config/rope_config.h"
#include "common/model/loading/peft_files.h"
#include "common/rpc/convert/compute_config.h"
#include "common/tensor/weight_spec.h"
#include "common/weights/gpu/copy_parts.h"
#include "common/weights/weight_components.h"
#include "services/trainer/engine/types.h"
#include "services/trainer/service/speculator_config.h"
#include "services/training_core/service/strategy_config.h"

namespace tandem::trainer {
namespace {

// Adds a model that does not train, unless it computes with the weights in training: its weights,
// whole, in the type of the computation or packed as the trained model's frozen ones are, copies of
// those that linear maps multiply rounded inputs by, and its tables of rotations.
absl::Status AddFrozenModel(const std::string& name, const std::string& field,
                            const std::string& directory,
                            const config::v1::TrainerServerConfig& config, MemoryPlan& plan) {
  if (directory.empty() ||
      (name != "reference" && IsBaseModel(directory, config.model(), config.has_lora(),
                                          training::ToStrategyOptions(config.strategy())))) {
    return absl::OkStatus();
  }
  TANDEM_ASSIGN_OR_RETURN(const ModelConfig model, rpc::ConfiguredModel(field, directory));
  TANDEM_ASSIGN_OR_RETURN(const std::vector<ParameterSpec> specs,
                          ModelParameters(model, {.tied = model.tie_word_embeddings}));
  const kernels::WeightFormat format = rpc::FrozenFormat(config);
  const auto item = static_cast<int64_t>(ItemSizeBytes(rpc::ComputeType(config.compute())));
  int64_t bytes = 0, copied = 0;
  for (const ParameterSpec& spec : specs) {
    const bool multiplies = model.tie_word_embeddings || spec.name != kEmbeddingName;
    if (spec.packs() && multiplies) copied += spec.numel();
    bytes += IsPacked(spec, format) ? kernels::PackedBytes(format, spec.shape[0], spec.shape[1])
                                    : spec.numel() * item;
  }
  const bool on_host = config.compute().device() == "cpu";
  plan.items.push_back({name + "_weights", bytes, on_host});
  if (const DType type = rpc::ActivationType(config.compute()); type != DType::kFloat32) {
    plan.items.push_back(
        {name + "_compute_copy", copied * static_cast<int64_t>(ItemSizeBytes(type)), on_host});
  }
  plan.items.push_back(
      {name + "_rotary_tables", RotaryTableBytes(model, config.max_model_len()), on_host});
  return absl::OkStatus();
}

// Adds a speculator, which every rank holds whole and in float32 under every strategy, and whose
// heads' losses take `logits_chunk_bytes` beside the model's.
absl::Status AddSpeculator(const config::v1::TrainerServerConfig& config, const ModelConfig& model,
                           CountSpeculator count, int64_t logits_chunk_bytes, MemoryPlan& plan) {
  if (config.speculator().adapter().empty()) return absl::OkStatus();
  const absl::StatusOr<int64_t> values =
      count(ToSpeculatorSettings(config.speculator()),
            // The number of token ids, which may be lower, changes no shape.
            {.hidden_size = model.hidden_size, .vocab_size = model.vocab_size, .num_token_ids = 1});
  if (!values.ok()) return PrependFieldPath("speculator", values.status());
  const int64_t bytes = *values * static_cast<int64_t>(sizeof(float));
  const bool on_host = config.compute().device() == "cpu";
  plan.items.push_back({"speculator_weights", bytes, on_host});
  plan.items.push_back({"speculator_gradients", bytes, on_host});
  plan.items.push_back({"speculator_optimizer", 2 * bytes, on_host, "two moments"});
  plan.items.push_back({"speculator_logits", logits_chunk_bytes, on_host});
  plan.items.push_back({"speculator_staging", 3 * bytes, /*on_host=*/true,
                        "weights and moments of a checkpoint, while it is loaded"});
  if (config.checkpoint_snapshot()) {
    plan.items.push_back({"speculator_snapshot", 3 * bytes, /*on_host=*/true,
                          "for checkpoints that are written beside the next steps"});
  }
  return absl::OkStatus();
}

// Adds the rank's part of the copy of the weights that the ranks make on their GPUs, unless there
// is no room for it: then copies are in a file. Receivers are expected to keep matrices in the type
// of the computation, and the rest, with the speculator's heads, in float32; a copy that takes more
// is in a file, too.
absl::Status AddWeightsCopy(const config::v1::TrainerServerConfig& config, const ModelConfig& model,
                            const LoraOptions& lora, const FreeMemory& free, MemoryPlan& plan) {
  TANDEM_ASSIGN_OR_RETURN(const RankEnvironment environment, ReadRankEnvironment());
  if (config.compute().device() == "cpu") return absl::OkStatus();
  TANDEM_ASSIGN_OR_RETURN(const std::vector<ParameterSpec> specs,
                          ModelParameters(model, {.tied = model.tie_word_embeddings}, lora));
  std::vector<WeightSpec> tensors;
  for (const ParameterSpec& spec : specs) {
    if (lora.enabled() && !spec.adapts) continue;
    const bool rounded = spec.shape.size() > 1;
    tensors.push_back({.name = spec.name,
                       .dtype = rounded ? rpc::ComputeType(config.compute()) : DType::kFloat32,
                       .shape = spec.shape});
  }
  const int64_t heads = plan.bytes_of("speculator_weights") / static_cast<int64_t>(sizeof(float));
  if (heads > 0) tensors.push_back({.name = kSpeculatorComponent, .shape = {heads}});
  const int64_t bytes = LargestPartBytes(tensors, environment.world_size);
  const std::optional<int64_t>& most = free.devices[0];
  // A tenth stays free, as beside a KV cache: what is not there is copied to a file.
  if (most.has_value() && plan.device_bytes(0) + bytes > *most - *most / 10) {
    return absl::OkStatus();
  }
  plan.items.push_back(
      {kWeightsCopy, bytes, /*on_host=*/false, "for rollout servers with GPUs of this machine"});
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<MemoryPlan> PlanMemory(const config::v1::TrainerServerConfig& config,
                                      const FreeMemory& free, CountSpeculator count_speculator) {
  TANDEM_ASSIGN_OR_RETURN(const ModelConfig model, rpc::ConfiguredModel("model", config.model()));
  TANDEM_ASSIGN_OR_RETURN(const LoraOptions lora, ResolveLora(rpc::ToLoraOptions(config.lora())));
  const bool on_host = config.compute().device() == "cpu";
  TANDEM_ASSIGN_OR_RETURN(
      MemoryPlan plan,
      training::PlanTraining(config.strategy(),
                             {.config = model,
                              .head = HeadKind::kLm,
                              .freeze = {config.freeze().begin(), config.freeze().end()},
                              .lora = lora,
                              .freeze_all = config.speculator().freeze_base_model(),
                              .dtype = rpc::ComputeType(config.compute()),
                              .weight_dtype = rpc::WeightType(config.compute()),
                              .weight_format = rpc::FrozenFormat(config),
                              .activation_dtype = rpc::ActivationType(config.compute()),
                              .on_host = on_host,
                              .shared_prefixes = config.batch().shared_prefixes(),
                              .product_rows = config.compute().product_rows()},
                             config.batch().micro_batch_tokens(), config.max_model_len(),
                             config.checkpoint_snapshot()));
  TANDEM_RETURN_IF_ERROR(
      AddFrozenModel("reference", "reference_model", config.reference_model(), config, plan));
  TANDEM_RETURN_IF_ERROR(
      AddFrozenModel("junior", "junior_model", config.junior_model(), config, plan));
  TANDEM_RETURN_IF_ERROR(
      AddFrozenModel("teacher", "teacher_model", config.teacher_model(), config, plan));
  const int64_t logits_chunk_bytes =
      LogitsChunkBytes(config.batch().logits_chunk_bytes(), model.vocab_size);
  TANDEM_RETURN_IF_ERROR(AddSpeculator(config, model, count_speculator, logits_chunk_bytes, plan));
  // The KL towards the junior and the teacher's divergence need a buffer each.
  const int64_t buffers =
      1 + (config.junior_model().empty() ? 0 : 1) + (config.teacher_model().empty() ? 0 : 1);
  plan.items.push_back({"logits", buffers * logits_chunk_bytes, on_host});
  if (model.vision.has_value()) {
    plan.items.push_back({"blob_cache", config.server().blob_cache_bytes()});
  }
  TANDEM_RETURN_IF_ERROR(AddWeightsCopy(config, model, lora, free, plan));
  return plan;
}

}  // namespace tandem::trainer
