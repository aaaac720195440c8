#include "common/parallel/memory/training_memory.h"

#include <algorithm>
#include <map>
#include <utility>

#include "common/base/errors/status_macros.h"
#include "common/kernels/paged_plan.h"
#include "common/model/config/rope_config.h"
#include "common/model/family.h"
#include "common/model/parameters/shard_numel.h"
#include "common/model/vision/vision_activations.h"
#include "common/ops/attention/shared_prefixes.h"
#include "common/parallel/megatron/mesh_shape.h"
#include "common/parallel/megatron/pipeline_schedule.h"

namespace tandem::parallel {
namespace {

constexpr int64_t kFloatBytes = 4;
constexpr int64_t kTowerBlock = 1;  // of a model with a vision tower

// Numbers of values in one block of a pass, as one rank holds it.
struct BlockSize {
  int64_t all = 0;
  int64_t trained = 0;
  int64_t linear = 0;  // of linear maps, which are multiplied in the computation's type
  // Values of adapters, which the others count, too; they have gradients of their own.
  int64_t adapters = 0;
  // Bytes of the matrices that are packed, and whose values the others do not count.
  int64_t packed_bytes = 0;
  // Per token, what adapters keep for the backward pass.
  int64_t low_rank = 0;

  // The values of its gradients: those of the whole block if any parameter of it trains.
  int64_t gradients() const { return (trained > adapters ? all - adapters : 0) + adapters; }
};

// The model as one tensor-parallel rank holds it, with a shard of the experts.
struct ShardedModel {
  const ModelConfig& config;
  const Family& family;
  const TrainedModel& options;
  bool tied = false;
  int64_t tensor_ranks = 1;
  std::vector<BlockSize> blocks;
  // The experts of each block, where they are sharded; else they are among `blocks`.
  std::vector<BlockSize> experts;

  int64_t last_block() const { return static_cast<int64_t>(blocks.size()) - 1; }
  // The block that holds the head's parameters.
  int64_t head_block() const { return tied ? 0 : last_block(); }
  int64_t Gradients(int64_t block) const { return At(block).gradients(); }
  const BlockSize& At(int64_t block) const { return blocks[static_cast<size_t>(block)]; }
};

absl::StatusOr<ShardedModel> Sharded(const TrainedModel& model, int64_t tensor_rank,
                                     int64_t tensor_ranks, const ExpertShard& experts = {}) {
  TANDEM_ASSIGN_OR_RETURN(const Family* family, FindFamily(model.config.model_type));
  const bool tied =
      model.head == HeadKind::kLm && model.config.tie_word_embeddings && !model.untie_embeddings;
  ShardedModel sharded = {.config = model.config,
                          .family = *family,
                          .options = model,
                          .tied = tied,
                          .tensor_ranks = tensor_ranks,
                          .blocks = {},
                          .experts = {}};
  TANDEM_ASSIGN_OR_RETURN(
      const auto specs,
      ModelParameters(model.config, {.kind = model.head, .tied = tied}, model.lora));
  std::vector<bool> trainable(specs.size(), false);
  if (!model.freeze_all) {
    TANDEM_ASSIGN_OR_RETURN(trainable, TrainableParameters(specs, model.freeze, model.lora));
  }
  for (size_t i = 0; i < specs.size(); ++i) {
    const ParameterSpec& spec = specs[i];
    const int64_t numel = ShardNumel(spec, tensor_rank, tensor_ranks, experts);
    const size_t count = std::max(sharded.blocks.size(), static_cast<size_t>(spec.block) + 1);
    sharded.blocks.resize(count);
    sharded.experts.resize(count);
    const bool apart = spec.expert.has_value() && experts.count > 1;
    BlockSize& block = (apart ? sharded.experts : sharded.blocks)[static_cast<size_t>(spec.block)];
    if (!trainable[i] && IsPacked(spec, model.weight_format)) {
      if (!spec.IsIn(experts)) continue;
      const std::vector<int64_t> shape =
          spec.ShardOf(tensor_rank, tensor_ranks, experts).ShapeOf(spec.shape);
      block.packed_bytes += kernels::PackedBytes(model.weight_format, shape[0], shape[1]);
      continue;
    }
    block.all += numel;
    if (trainable[i]) block.trained += numel;
    if (spec.adapts && trainable[i]) block.adapters += numel;
    // A x of each adapter, and the same times the scale.
    if (spec.adapts && spec.shape[0] == model.lora.rank) block.low_rank += 2 * model.lora.rank;
    // Neither norms nor the rows of an embedding are multiplied, and some matrices are not rounded.
    const bool rounds = model.weight_dtype != DType::kFloat32;
    if (spec.init != Init::kOnes && (tied || spec.name != kEmbeddingName) &&
        !(rounds && spec.stays_dense)) {
      block.linear += numel;
    }
  }
  return sharded;
}

// Returns the bytes of a value of the copies that linear maps multiply with, in the type of the
// computation; 0 if they multiply with float32.
int64_t TypedCopyBytes(const TrainedModel& model) {
  return model.dtype == DType::kFloat32 ? 0 : static_cast<int64_t>(ItemSizeBytes(model.dtype));
}

// Returns the same with rounded copies, which have the type of the inputs of linear maps.
int64_t CopyBytes(const TrainedModel& model) {
  return model.weight_dtype == DType::kFloat32
             ? TypedCopyBytes(model)
             : static_cast<int64_t>(ItemSizeBytes(model.activation_dtype));
}

// Collects the items of a plan, each in the memory of the host or of the device that computes.
class Items {
 public:
  explicit Items(const TrainedModel& model) : on_host_(model.on_host) {}

  // Adds nothing for 0 bytes, like the following two.
  void Add(const std::string& name, int64_t bytes) {
    if (bytes == 0) return;
    plan_.items.push_back({.name = name, .bytes = bytes, .on_host = on_host_});
  }
  void AddOnHost(const std::string& name, int64_t bytes) {
    if (bytes == 0) return;
    plan_.items.push_back({.name = name, .bytes = bytes, .on_host = true});
  }
  // Adds the copies of float32 masters that linear maps multiply with.
  void AddComputeCopy(int64_t bytes) { Add("compute_copy", bytes); }
  MemoryPlan Take() { return std::move(plan_); }

 private:
  const bool on_host_;
  MemoryPlan plan_;
};

// Bytes per token that a pass keeps of the layers among blocks [begin, end).
int64_t KeptBytes(const ShardedModel& model, Recompute recompute, const BlockRange& range) {
  if (model.options.freeze_all) return 0;
  int64_t bytes = 0;
  for (int64_t block = range.begin; block < range.end; ++block) {
    if (block < model.config.FirstLayerBlock() || block == model.last_block()) continue;
    bytes += recompute == Recompute::kFull
                 ? model.config.hidden_size * kFloatBytes / model.tensor_ranks
                 : model.family.TrainingActivationBytes(
                       model.config, block - model.config.FirstLayerBlock(), model.tensor_ranks) +
                       model.At(block).low_rank * kFloatBytes;
  }
  return bytes;
}

// Bytes per token that exist once, however many micro-batches are under way: the embedding's rows,
// the final norm, the hidden states and their gradient; where layers are computed again, one layer
// with the gradients of its widest point; without autograd, a layer's widest point.
int64_t WorkingBytes(const ShardedModel& model, Recompute recompute) {
  const int64_t ends = 4 * model.config.hidden_size * kFloatBytes;
  const int64_t widest = model.family.InferenceActivations(model.config, model.tensor_ranks,
                                                           /*whole_experts=*/false) *
                         kFloatBytes;
  if (model.options.freeze_all) return ends + widest;
  if (recompute != Recompute::kFull) return ends;
  int64_t layer_bytes = 0;
  for (int64_t layer = 0; layer < model.config.num_hidden_layers; ++layer) {
    layer_bytes = std::max(
        layer_bytes, model.family.TrainingActivationBytes(model.config, layer, model.tensor_ranks));
  }
  return ends + layer_bytes + widest;
}

// Bytes per token that the vision tower takes where all tokens stand for images: all of it is under
// way at once, whether a pass keeps it or computes it again.
int64_t TowerBytes(const ShardedModel& model) {
  if (!model.config.vision.has_value()) return 0;
  const VisionConfig& vision = *model.config.vision;
  const bool trains = model.Gradients(kTowerBlock) > 0;
  return vision.merge_unit() * kFloatBytes *
         (trains ? VisionTrainingActivations(vision)
                 : vision.patch_values() + VisionLayerActivations(vision));
}

// Bytes per token of the rows of one layer that travel to their experts: those that are sent, those
// that come, in the order of the ranks and in that of the experts, and on the way back the
// gradients that are not sent yet.
int64_t ExchangedBytes(const ShardedModel& model) {
  const int64_t rows = model.config.decoder.experts.routing.num_experts_per_tok;
  return 4 * rows * model.config.hidden_size * kFloatBytes;
}

// Numbers of a token's keys and values in the layer that has the most.
int64_t WidestKeysAndValues(const TrainedModel& model, const Family& family, int64_t tensor_ranks) {
  int64_t widest = 0;
  for (const LayerCache& layer : family.CacheLayout(model.config, tensor_ranks)) {
    const int64_t value_dim = layer.value_dim > 0 ? layer.value_dim : layer.head_dim;
    widest = std::max(widest, layer.heads * (layer.head_dim + value_dim));
  }
  return widest;
}

int64_t WholePassBytes(const ShardedModel& model, Recompute recompute) {
  return KeptBytes(model, recompute, {0, model.last_block() + 1}) + WorkingBytes(model, recompute);
}

absl::StatusOr<MemoryPlan> SingleMemory(Recompute recompute, const TrainedModel& options,
                                        int64_t tokens) {
  TANDEM_ASSIGN_OR_RETURN(const ShardedModel model, Sharded(options, 0, 1));
  BlockSize sum;
  for (const BlockSize& block : model.blocks) {
    sum.all += block.all;
    sum.trained += block.trained;
    sum.linear += block.linear;
    sum.packed_bytes += block.packed_bytes;
  }
  Items items(options);
  items.Add("weights", sum.all * kFloatBytes);
  items.Add("packed_weights", sum.packed_bytes);
  items.AddComputeCopy(sum.linear * CopyBytes(options));
  items.Add("gradients", sum.trained * kFloatBytes);
  items.Add("optimizer", 2 * sum.trained * kFloatBytes);
  items.Add("activations", tokens * WholePassBytes(model, recompute));
  items.Add("vision_activations", tokens * TowerBytes(model));
  return items.Take();
}

// Returns the maximum of the values that are whole at the same time: the head's, or those of a
// block that runs and, if transfers overlap, of the next one.
template <typename SizeOf>
int64_t WholeAtOnce(const ShardedModel& model, bool overlaps, const SizeOf& size_of) {
  int64_t peak = size_of(model.last_block());
  if (model.tied) peak += size_of(0);
  for (int64_t block = 0; block < model.last_block(); ++block) {
    peak = std::max(peak, size_of(block) + (overlaps ? size_of(block + 1) : 0));
  }
  return peak;
}

absl::StatusOr<MemoryPlan> ZeroMemory(const ZeroOptions& zero, Recompute recompute,
                                      const TrainedModel& options, int64_t tokens, int64_t ranks) {
  TANDEM_ASSIGN_OR_RETURN(const ShardedModel model, Sharded(options, 0, 1));
  const auto shard = [&](int64_t numel) { return (numel + ranks - 1) / ranks; };
  const bool shards_parameters = zero.stage == 3, shards_gradients = zero.stage >= 2;
  int64_t weights = 0, packed_bytes = 0, copies = 0, gradients = 0, optimized = 0;
  for (int64_t index = 0; index <= model.last_block(); ++index) {
    const BlockSize& block = model.At(index);
    weights += shards_parameters ? shard(block.all) : block.all;
    packed_bytes += block.packed_bytes;
    copies += shards_parameters ? shard(block.all) : block.linear;
    gradients += shards_gradients ? shard(model.Gradients(index)) : model.Gradients(index);
    // Where only some parameters train, a rank's shard may hold more of them than another's.
    optimized += std::min(block.trained - block.adapters, shard(block.all - block.adapters)) +
                 shard(block.adapters);
  }
  Items items(options);
  items.Add("weights", weights * kFloatBytes);
  items.Add("packed_weights", packed_bytes);
  if (shards_parameters) {
    const auto all = [&](int64_t block) { return model.At(block).all; };
    // A gathered copy in another type is there beside float32 memory for what is read as a master.
    items.Add("gathered_weights",
              WholeAtOnce(model, zero.overlap_comm, all) * (kFloatBytes + TypedCopyBytes(options)));
  }
  // Stage 3 rounds what it has gathered in place.
  items.AddComputeCopy(copies * (shards_parameters ? TypedCopyBytes(options) : CopyBytes(options)));
  items.Add("gradients", gradients * kFloatBytes);
  if (shards_gradients) {
    // A tied head's gradients, the embedding's, are open from the loss to the end.
    const auto open = [&](int64_t block) {
      return model.Gradients(block) + shard(model.Gradients(block));
    };
    int64_t peak = WholeAtOnce(model, zero.overlap_comm, open);
    if (model.tied && model.last_block() > 1) peak += open(0);
    items.Add("whole_gradients", peak * kFloatBytes);
  }
  if (zero.offload_optimizer && !options.on_host) {
    items.AddOnHost("optimizer_and_masters", 3 * optimized * kFloatBytes);
  } else {
    items.Add("optimizer", 2 * optimized * kFloatBytes);
  }
  items.Add("activations", tokens * WholePassBytes(model, recompute));
  items.Add("vision_activations", tokens * TowerBytes(model));
  return items.Take();
}

// Returns the maximum of the bytes that a stage keeps at the same time, if one of its virtual
// stages keeps `kept(blocks)` of a micro-batch.
template <typename KeptOf>
int64_t MostKept(const ShardedModel& model, const PipelineShape& shape, int64_t stage,
                 const KeptOf& kept) {
  // Enough micro-batches for a full pipeline.
  const int64_t micro_batches = 2 * shape.stages;
  int64_t open = 0, peak = 0;
  for (const PipelineAction& action : PipelineSchedule(shape, micro_batches, stage)) {
    const BlockRange blocks =
        BlocksOfVirtualStage(model.config.num_hidden_layers, model.config.FirstLayerBlock(), shape,
                             stage, action.virtual_stage);
    open += (action.is_forward ? 1 : -1) * kept(blocks);
    peak = std::max(peak, open);
  }
  return peak;
}

// Returns the maximum of the bytes per token that a stage keeps at the same time.
int64_t PipelineBytes(const ShardedModel& model, Recompute recompute, const PipelineShape& shape,
                      int64_t stage) {
  if (model.options.freeze_all) {
    // Hidden states on their way to the next stage alone.
    const int64_t sends = shape.stages > 1 ? kSendsInFlight : 0;
    return sends * model.config.hidden_size * kFloatBytes / model.tensor_ranks;
  }
  return MostKept(model, shape, stage,
                  [&](const BlockRange& blocks) { return KeptBytes(model, recompute, blocks); });
}

// The same of the vision tower.
int64_t PipelineTowerBytes(const ShardedModel& model, Recompute recompute,
                           const PipelineShape& shape, int64_t stage) {
  if (stage != 0) return 0;
  const bool keeps = recompute != Recompute::kFull && model.Gradients(kTowerBlock) > 0;
  if (!keeps) return TowerBytes(model);
  return MostKept(model, shape, stage, [&](const BlockRange& blocks) {
    return blocks.Has(kTowerBlock) ? TowerBytes(model) : 0;
  });
}

absl::StatusOr<MemoryPlan> MegatronMemory(const MegatronOptions& megatron, Recompute recompute,
                                          const TrainedModel& options, int64_t tokens, int64_t rank,
                                          int64_t ranks) {
  const MeshShape mesh = MeshOf(megatron, ranks);
  const MeshCoordinates at = mesh.Coordinates(static_cast<int>(rank));
  const PipelineShape shape = PipelineOf(megatron);
  TANDEM_ASSIGN_OR_RETURN(const ShardedModel model,
                          Sharded(options, at.tensor, mesh.tensor,
                                  {.index = mesh.ExpertRank(at), .count = mesh.expert}));
  const auto holds = [&](int64_t block) {
    if (block == 0 && model.tied && at.pipeline == mesh.pipeline - 1) return true;
    for (int64_t i = 0; i < shape.virtual_stages; ++i) {
      if (BlocksOfVirtualStage(model.config.num_hidden_layers, model.config.FirstLayerBlock(),
                               shape, at.pipeline, i)
              .Has(block)) {
        return true;
      }
    }
    return false;
  };
  int64_t weights = 0, packed_bytes = 0, linear = 0, gradients = 0, optimized = 0;
  // Adds values of which `holders` ranks hold the same.
  const auto add = [&](const BlockSize& block, int64_t holders) {
    const int64_t optimizer_ranks = megatron.use_distributed_optimizer ? holders : 1;
    weights += block.all;
    packed_bytes += block.packed_bytes;
    linear += block.linear;
    gradients += block.gradients();
    optimized += std::min(block.trained, (block.all + optimizer_ranks - 1) / optimizer_ranks);
  };
  for (int64_t index = 0; index <= model.last_block(); ++index) {
    if (!holds(index)) continue;
    add(model.At(index), mesh.context * mesh.data);
    add(model.experts[static_cast<size_t>(index)], mesh.context * mesh.data / mesh.expert);
  }
  Items items(options);
  items.Add("weights", weights * kFloatBytes);
  items.Add("packed_weights", packed_bytes);
  items.AddComputeCopy(linear * CopyBytes(options));
  items.Add("gradients", gradients * kFloatBytes);
  items.Add("optimizer", 2 * optimized * kFloatBytes);
  const int64_t own_tokens = (tokens + mesh.context - 1) / mesh.context;
  items.Add("activations", own_tokens * (PipelineBytes(model, recompute, shape, at.pipeline) +
                                         WorkingBytes(model, recompute) +
                                         (mesh.expert > 1 ? ExchangedBytes(model) : 0)));
  // An image that several ranks of a sequence have rows of is whole in the tower of each.
  items.Add("vision_activations",
            tokens * PipelineTowerBytes(model, recompute, shape, at.pipeline));
  return items.Take();
}

}  // namespace

absl::StatusOr<MemoryPlan> TrainingMemory(const StrategyOptions& options, const TrainedModel& model,
                                          int64_t tokens, int64_t rank, int64_t ranks) {
  const Recompute recompute = options.recompute_granularity;
  const auto plan = [&]() -> absl::StatusOr<MemoryPlan> {
    if (options.name == "zero") return ZeroMemory(options.zero, recompute, model, tokens, ranks);
    if (options.name == "megatron") {
      return MegatronMemory(options.megatron, recompute, model, tokens, rank, ranks);
    }
    return SingleMemory(recompute, model, tokens);
  };
  TANDEM_ASSIGN_OR_RETURN(MemoryPlan result, plan());
  TANDEM_ASSIGN_OR_RETURN(const Family* family, FindFamily(model.config.model_type));
  const int64_t tensor_ranks =
      options.name == "megatron" ? options.megatron.tensor_model_parallel_size : 1;
  const int64_t widest = WidestKeysAndValues(model, *family, tensor_ranks);
  if (model.shared_prefixes) {
    // Keys and values side by side with copies, then the gradients of as many.
    result.items.push_back(
        {"shared_keys", tokens * (1 + ops::kKeysPerRow) * widest * kFloatBytes, model.on_host});
  }
  if (model.product_rows > 0) {
    const int64_t outputs = std::max(2 * model.config.intermediate_size,
                                     model.head == HeadKind::kLm ? model.config.vocab_size : 1);
    const int64_t inputs = std::max(model.config.intermediate_size, model.config.hidden_size);
    result.items.push_back(
        {"padded_rows", model.product_rows * (inputs + outputs) * kFloatBytes, model.on_host});
  }
  if (model.product_rows > 0 && !model.config.decoder.latent.has_value()) {
    // A last block is at most empty but for a token.
    const int64_t in_blocks =
        2 * tokens * widest * static_cast<int64_t>(ItemSizeBytes(model.dtype));
    result.items.push_back(
        {"attention_blocks", in_blocks + kernels::kPartialNumbers * kFloatBytes, model.on_host});
  }
  result.items.push_back({"rotary_tables", RotaryTableBytes(model.config, tokens), model.on_host});
  return result;
}

absl::StatusOr<int64_t> CheckpointCopyBytes(const StrategyOptions& options,
                                            const TrainedModel& model, const MemoryPlan& plan,
                                            int64_t ranks) {
  TANDEM_ASSIGN_OR_RETURN(const ShardedModel whole, Sharded(model, 0, 1));
  int64_t all = 0, trained = 0;
  for (const BlockSize& block : whole.blocks) {
    all += block.all;
    trained += block.trained;
  }
  // With adapters rank 0 writes all that trains. A single process copies nothing that is frozen.
  const bool only_trained = options.name == "single" || model.lora.enabled();
  int64_t bytes = (only_trained ? trained : (all + ranks - 1) / ranks) * kFloatBytes;
  for (const MemoryPlan::Item& item : plan.items) {
    if (item.name == "optimizer") bytes += item.bytes;
    if (item.name == "optimizer_and_masters") bytes += item.bytes / 3 * 2;
  }
  return bytes;
}

}  // namespace tandem::parallel
