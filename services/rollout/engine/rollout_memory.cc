#include "services/rollout/engine/rollout_memory.h"

#include <algorithm>
#include <array>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "common/base/errors/error.h"
#include "common/base/errors/status_macros.h"
#include "common/kernels/device_kernels.h"
#include "common/kernels/paged_plan.h"
#include "common/model/config/parameter_spec.h"
#include "common/model/config/rope_config.h"
#include "common/model/family.h"
#include "common/model/loading/peft_files.h"
#include "common/model/parameters/shard.h"
#include "common/model/parameters/shard_numel.h"
#include "common/model/passes/decode_shape.h"
#include "common/model/passes/layer_cache.h"
#include "common/model/vision/vision_activations.h"
#include "common/ops/attention/gathered_keys.h"
#include "common/weights/word_sums.h"
#include "services/rollout/engine/models/model_runner.h"

namespace tandem::rollout {
namespace {

constexpr int64_t kFloatBytes = 4;

// Share of the available memory that a chosen cache leaves free, one part in so many: for the
// program itself, the buffers of calls, and what the allocator keeps.
constexpr int64_t kFreeShare = 10;

// A model that the first `ranks` ranks of the server hold.
struct Lane {
  bool is_senior;
  std::string name;
  const ModelConfig& config;
  int64_t ranks = 1;
  bool whole_experts = false;
  const LaneMemoryOptions& options;
  const Family* family = nullptr;
  LaneBlocks blocks = {};

  // The setting of its longest sequence.
  std::string length_field() const { return name + ".max_model_len"; }
  int64_t longest_sequence() const { return config.LongestSequence(options.max_model_len); }
  // The most blocks that a sequence holds between two passes: those of its window, or all.
  int64_t sequence_blocks() const {
    const int64_t window = LongestWindow(family->CacheLayout(config, /*shard_count=*/1));
    return std::min(KvBlocks(longest_sequence()), WindowBlocks(window));
  }
  std::string utilization_field() const { return name + ".gpu_memory_utilization"; }
  // The fewest blocks that the lane works with: those of one sequence, beside the scorer's.
  int64_t fewest_blocks() const { return KvBlocks(longest_sequence()) + blocks.scorer; }
};

// The memory of passes beside the weights and the cache. Lanes run one after the other, and each
// keeps its tables.
struct PassBytes {
  int64_t activations = 0;
  int64_t logits = 0;
  int64_t rotary_tables = 0;
  int64_t images = 0;
};

// Returns the bytes that images take in a lane: the rows that stay, and an image as long as the
// longest sequence in the tower.
int64_t ImageBytes(const ModelConfig& config, int64_t longest_sequence) {
  const VisionConfig& vision = *config.vision;
  return kImageRowBytes +
         longest_sequence * kFloatBytes *
             (config.hidden_size + vision.merge_unit() * VisionLayerActivations(vision));
}

absl::StatusOr<std::vector<ParameterSpec>> Parameters(const Lane& lane) {
  const auto read = [&]() -> absl::StatusOr<std::vector<ParameterSpec>> {
    TANDEM_ASSIGN_OR_RETURN(const LoraOptions lora, ResolveLora(lane.options.lora));
    return ModelParameters(lane.config, {.tied = lane.config.tie_word_embeddings}, lora);
  };
  absl::StatusOr<std::vector<ParameterSpec>> specs = read();
  if (!specs.ok()) return PrependFieldPath(lane.name, specs.status());
  return specs;
}

// Returns the bytes of the shard that rank `rank` holds of a parameter. Matrices are linear maps,
// or the embedding.
int64_t WeightBytes(const ParameterSpec& spec, int64_t rank, int64_t ranks,
                    const ExpertShard& experts, const LaneStorage& storage) {
  if (!IsPacked(spec, storage.weight_format)) {
    return ShardNumel(spec, rank, ranks, experts) *
           static_cast<int64_t>(ItemSizeBytes(StoredType(spec, storage)));
  }
  if (!spec.IsIn(experts)) return 0;
  const std::vector<int64_t> shape = spec.ShardOf(rank, ranks, experts).ShapeOf(spec.shape);
  return kernels::PackedBytes(storage.weight_format, shape[0], shape[1]);
}

// Returns the bytes of the weights that rank `rank` holds of a lane.
int64_t WeightsOf(const Lane& lane, const std::vector<ParameterSpec>& specs, int64_t rank) {
  const ExpertShard experts = ExpertsOfRank(lane.whole_experts, rank, lane.ranks);
  int64_t bytes = 0;
  for (const ParameterSpec& spec : specs) {
    bytes += WeightBytes(spec, rank, lane.ranks, experts, lane.options.storage);
  }
  return bytes;
}

// Adds the memory that an update of the senior's weights takes while it goes on.
absl::Status AddUpdate(const Lane& senior, const RolloutMemoryOptions& options, MemoryPlan& plan) {
  if (options.rank >= senior.ranks) return absl::OkStatus();
  TANDEM_ASSIGN_OR_RETURN(std::vector<ParameterSpec> specs, Parameters(senior));
  // An update of a senior with adapters only brings these.
  if (std::ranges::any_of(specs, &ParameterSpec::adapts)) {
    std::erase_if(specs, [](const ParameterSpec& spec) { return !spec.adapts; });
  }
  int64_t all = 0, largest = 0;
  for (const ParameterSpec& spec : specs) {
    all += spec.numel() * kFloatBytes;
    largest = std::max(largest, spec.numel() * kFloatBytes);
  }
  int64_t staged = largest;  // other ranks get one tensor after the other
  int64_t copy = WeightsOf(senior, specs, options.rank);
  if (options.rank == 0) {
    // The tensor that comes and the one that is packed (common/weights/tensor_stager.h); rank 0 of
    // a sharded senior keeps all of them for the others, unless they are in a GPU's memory.
    largest = std::max(largest, options.speculator.largest_bytes);
    staged = senior.ranks > 1 ? all + 2 * options.speculator.largest_bytes : 2 * largest;
    copy += options.speculator.bytes;
  }
  plan.items.push_back({"weight_update_copy", copy, options.on_host});
  plan.items.push_back({"staged_weight_update", staged});
  if (options.on_host) return absl::OkStatus();
  // A tensor that comes from a trainer's GPU, in the type that is kept, is whole on that of every
  // rank while it is added up and packed.
  int64_t whole = options.rank == 0 ? options.speculator.largest_bytes : 0;
  for (const ParameterSpec& spec : specs) {
    const auto item = static_cast<int64_t>(ItemSizeBytes(StoredType(spec, senior.options.storage)));
    whole = std::max(whole, spec.numel() * item);
  }
  const int64_t words = std::min(kDeviceWords, whole / kFloatBytes);
  plan.items.push_back(
      {"weight_update_from_gpu", whole + words * kDeviceBytesOfWord, /*on_host=*/false});
  return absl::OkStatus();
}

// Returns the bytes of a block of the lane's cache, in one of `ranks` shards.
int64_t BlockBytes(const Lane& lane, int64_t ranks) {
  int64_t per_token = 0;
  for (const LayerCache& layer : lane.family->CacheLayout(lane.config, ranks)) {
    per_token += layer.values_per_token();
  }
  const auto item = static_cast<int64_t>(ItemSizeBytes(lane.options.storage.cache_dtype));
  return kKvBlockTokens * (per_token * item + lane.config.RoutingLayout().bytes_per_token());
}

// Returns the lanes of a server, with the blocks that max_num_seqs sequences need.
absl::StatusOr<std::vector<Lane>> MakeLanes(const ModelConfig& senior, const ModelConfig* junior,
                                            const RolloutMemoryOptions& options) {
  std::vector<Lane> lanes = {{.is_senior = true,
                              .name = "senior",
                              .config = senior,
                              .ranks = options.layout.tensor_parallel_size,
                              .whole_experts = options.layout.enable_expert_parallel,
                              .options = options.senior}};
  if (junior != nullptr) {
    lanes.push_back({.is_senior = false,
                     .name = "junior",
                     .config = *junior,
                     .ranks = options.layout.junior_tensor_parallel_size,
                     .whole_experts = options.layout.junior_enable_expert_parallel,
                     .options = options.junior});
  }
  for (Lane& lane : lanes) {
    TANDEM_ASSIGN_OR_RETURN(lane.family, FindFamily(lane.config.model_type));
    const int64_t tokens = lane.longest_sequence();
    // A pass may add a block to each sequence, and those of its tokens, before it gives back what
    // lies before the windows.
    const int64_t most =
        options.max_num_seqs * (lane.sequence_blocks() + 1) + KvBlocks(options.max_batched_tokens);
    lane.blocks = {.generator = std::min(std::max(most, KvBlocks(tokens)),
                                         options.max_num_seqs * KvBlocks(tokens)),
                   .scorer = KvBlocks(std::max(tokens, options.max_batched_tokens))};
  }
  return lanes;
}

// A lane whose blocks of `block_bytes` are counted.
struct CountedLane {
  Lane* lane;
  int64_t block_bytes;
};

// Cuts the lanes' blocks to `bytes` in all, as many for either lane, but never below the fewest
// that a lane works with. Returns whether `bytes` hold them.
bool LimitBlocks(std::vector<CountedLane> lanes, int64_t bytes) {
  // The lane that wants fewer blocks comes first, so that the other gets what it leaves.
  std::ranges::stable_sort(lanes, {},
                           [](const CountedLane& counted) { return counted.lane->blocks.total(); });
  int64_t bytes_of_each = 0, fewest_bytes = 0;  // of this lane and those that follow
  for (const auto& [lane, block_bytes] : lanes) {
    bytes_of_each += block_bytes;
    fewest_bytes += lane->fewest_blocks() * block_bytes;
  }
  const bool holds = fewest_bytes <= bytes;
  for (const auto& [lane, block_bytes] : lanes) {
    fewest_bytes -= lane->fewest_blocks() * block_bytes;
    const int64_t most = std::min(bytes / bytes_of_each, (bytes - fewest_bytes) / block_bytes);
    const int64_t scorer = lane->blocks.scorer;
    lane->blocks.generator =
        std::clamp(most - scorer, lane->fewest_blocks() - scorer, lane->blocks.generator);
    bytes -= lane->blocks.total() * block_bytes;
    bytes_of_each -= block_bytes;
  }
  return holds;
}

absl::Status TooFewBytes(const std::vector<Lane>& lanes, int64_t bytes) {
  int64_t bytes_of_each = 0;
  std::string needs;
  for (const Lane& lane : lanes) {
    bytes_of_each += BlockBytes(lane, /*ranks=*/1);
    absl::StrAppend(&needs, needs.empty() ? "" : ", and ", "the ", lane.name, " needs ",
                    lane.fewest_blocks(), " for one sequence of ", lane.longest_sequence(),
                    " tokens (", lane.length_field(), ") and for scoring");
  }
  return InvalidField("kv_cache_bytes",
                      absl::StrCat("holds ", bytes / bytes_of_each, " blocks of ", kKvBlockTokens,
                                   " tokens for each model; ", needs));
}

// Returns which of the rank's devices a lane computes on.
int DeviceOf(const Lane& lane, const RolloutMemoryOptions& options) {
  return lane.is_senior || !options.junior_has_own_device ? 0 : 1;
}

// Returns the bytes of the lane's fraction of its GPU's memory; nullopt: it has none, or the size
// of the GPU is not known.
std::optional<int64_t> ShareOf(const Lane& lane, const RolloutMemoryOptions& options) {
  const std::optional<double>& fraction = lane.options.gpu_memory_utilization;
  const std::optional<int64_t>& size =
      options.free.device_sizes[static_cast<size_t>(DeviceOf(lane, options))];
  if (!fraction.has_value() || !size.has_value()) return std::nullopt;
  return static_cast<int64_t>(*fraction * static_cast<double>(*size));
}

// Returns the most bytes of partial results that attention of `rows` rows has in a layer, for
// sequences of at most `tokens` tokens (kernels/paged_plan.h).
int64_t PartialBytes(const LayerCache& layer, int64_t heads, int64_t rows, int64_t tokens) {
  const int64_t splits = (tokens + kernels::kPagedSplitKeys - 1) / kernels::kPagedSplitKeys;
  if (splits == 1 || layer.value_dim > 0 || layer.head_dim > kernels::kPagedMaxHeadDim) return 0;
  const int64_t numbers = kernels::PartialNumbers(heads, layer.heads, layer.head_dim);
  return kFloatBytes * std::min(kernels::kPartialNumbers, rows * splits * numbers);
}

// Returns the bytes of a row's inputs of the widest map, rounded; 0 if the lane rounds none.
int64_t RoundedInputBytes(const Lane& lane, const std::vector<ParameterSpec>& specs) {
  if (lane.options.storage.activation_dtype == DType::kFloat32) return 0;
  int64_t widest = 0;
  for (const ParameterSpec& spec : specs) {
    if (!spec.packs()) continue;
    const int64_t experts =
        spec.expert.has_value() ? lane.config.decoder.experts.routing.num_experts_per_tok : 1;
    widest = std::max(widest, experts * (spec.shape[1] + 1));
  }
  return widest * static_cast<int64_t>(ItemSizeBytes(lane.options.storage.activation_dtype));
}

// Returns the bytes of the numbers of a pass that is padded (decode_shape.h), and of the tokens
// that the pass before draws.
int64_t DecodeBufferBytes(const Lane& lane) {
  const DecodeLayout layout({.rows = kMaxDecodeRows, .wanted = kMaxDecodeRows},
                            AttentionPlans(lane.family->CacheLayout(lane.config, /*shard_count=*/1),
                                           lane.config.num_attention_heads),
                            lane.longest_sequence(), kDrawNumbers);
  return layout.bytes + kMaxDecodeRows * static_cast<int64_t>(sizeof(double));
}

absl::Status AddLane(const Lane& lane, const RolloutMemoryOptions& options, MemoryPlan& plan,
                     PassBytes& pass) {
  if (options.rank >= lane.ranks) return absl::OkStatus();
  const ModelConfig& config = lane.config;
  TANDEM_ASSIGN_OR_RETURN(const std::vector<ParameterSpec> specs, Parameters(lane));
  const auto item = static_cast<int64_t>(ItemSizeBytes(lane.options.storage.dtype));
  const int device = DeviceOf(lane, options);
  const bool shares = !lane.is_senior && options.shares_base_model;
  plan.items.push_back({.name = lane.name + "_weights",
                        .bytes = shares ? 0 : WeightsOf(lane, specs, options.rank),
                        .on_host = options.on_host,
                        .device = device});
  const int64_t tokens = lane.longest_sequence();
  std::string note = absl::StrCat(
      "room for ", std::min(lane.blocks.generator / lane.sequence_blocks(), options.max_num_seqs),
      " of max_num_seqs=", options.max_num_seqs, " sequences of ", tokens, " tokens (",
      lane.length_field(), ")");
  if (const std::optional<int64_t> share = ShareOf(lane, options)) {
    absl::StrAppend(&note, "; the lane takes at most ", Gigabytes(*share), " (",
                    lane.utilization_field(), ")");
  }
  plan.items.push_back({.name = lane.name + "_kv_cache",
                        .bytes = lane.blocks.total() * BlockBytes(lane, lane.ranks),
                        .on_host = options.on_host,
                        .note = std::move(note),
                        .device = device});
  // Attention on a GPU copies the keys and values of a layer side by side where FlashAttention or
  // ATen takes them, those of one sequence at least, and of all sequences if they are few. The
  // kernel for the others has partial results.
  int64_t widest = 0;
  const std::vector<LayerCache> layers = lane.family->CacheLayout(config, lane.ranks);
  for (const LayerCache& layer : layers)
    widest = std::max(widest, 2 * layer.heads * layer.head_dim);
  const auto partials_of = [&](int64_t rows) {
    int64_t most = 0;
    for (const LayerCache& layer : layers) {
      most = std::max(most,
                      PartialBytes(layer, config.num_attention_heads / lane.ranks, rows, tokens));
    }
    return most;
  };
  const int64_t of_sequence = tokens * widest * item;
  const int64_t gathered = options.on_host
                               ? 0
                               : std::min(std::max(2 * ops::kGatheredNumbers * item, of_sequence),
                                          options.max_num_seqs * of_sequence);
  const int64_t product_rows = std::max<int64_t>(options.product_rows, 1);
  // Products have whole multiples of these rows.
  const auto multiplied = [&](int64_t rows) {
    return (rows + product_rows - 1) / product_rows * product_rows;
  };
  const int64_t rows = multiplied(options.max_batched_tokens);
  const int64_t row_activations =
      lane.family->InferenceActivations(config, lane.ranks, lane.whole_experts) * item +
      RoundedInputBytes(lane, specs);
  const int64_t activations = rows * row_activations + gathered +
                              (options.on_host ? 0 : partials_of(options.max_batched_tokens));
  pass.activations = std::max(pass.activations, activations);
  // The columns that all ranks bring are gathered and then put side by side. Where a device draws,
  // it has scaled logits, weights in two layouts, and what a cut sorts, beside them.
  const int64_t row_bytes = config.vocab_size * kFloatBytes;
  const int64_t copies = (lane.ranks > 1 ? 2 : 1) + (options.on_host ? 0 : 6);
  const int64_t logits =
      copies * (std::max(kLogitsBytes, row_bytes) + options.product_rows * row_bytes);
  pass.logits = std::max(pass.logits, logits);
  if (!lane.options.enforce_eager) {
    // The memory of a captured pass of the most rows, beside that of other passes.
    const int64_t padded = multiplied(kMaxDecodeRows);
    plan.items.push_back({.name = lane.name + "_graphs",
                          .bytes = DecodeBufferBytes(lane) + padded * row_activations +
                                   partials_of(kMaxDecodeRows) +
                                   std::min(logits, copies * padded * row_bytes),
                          .on_host = options.on_host,
                          .device = device});
  }
  pass.rotary_tables += RotaryTableBytes(config, tokens);
  if (config.vision.has_value()) {
    pass.images = std::max(pass.images, ImageBytes(config, lane.longest_sequence()));
  }
  return absl::OkStatus();
}

// Returns the items of one rank for lanes of these blocks.
absl::StatusOr<MemoryPlan> PlanLanes(const std::vector<Lane>& lanes,
                                     const RolloutMemoryOptions& options) {
  MemoryPlan plan;
  std::array<PassBytes, kDevicesOfRank> passes;
  for (const Lane& lane : lanes) {
    TANDEM_RETURN_IF_ERROR(
        AddLane(lane, options, plan, passes[static_cast<size_t>(DeviceOf(lane, options))]));
  }
  if (const Lane& senior = lanes.front(); senior.is_senior) {
    if (options.rank == 0 && options.speculator.bytes > 0) {
      plan.items.push_back({"speculator_weights", options.speculator.bytes, options.on_host});
    }
    TANDEM_RETURN_IF_ERROR(AddUpdate(senior, options, plan));
  }
  for (int device = 0; device < kDevicesOfRank; ++device) {
    const PassBytes& pass = passes[static_cast<size_t>(device)];
    const std::string prefix = device == 0 ? "" : "junior_";
    const auto add = [&](const char* name, int64_t bytes) {
      plan.items.push_back(
          {.name = prefix + name, .bytes = bytes, .on_host = options.on_host, .device = device});
    };
    if (device > 0 && pass.logits == 0) continue;  // no lane is there
    add("activations", pass.activations);
    add("logits", pass.logits);
    add("rotary_tables", pass.rotary_tables);
    if (pass.images > 0) add("images", pass.images);
  }
  if (options.rank == 0 && lanes.front().config.vision.has_value()) {
    plan.items.push_back({"blob_cache", options.blob_cache_bytes});
  }
  // GCC 12 sees wrong bounds in the assignment of the array.
  plan.remedy = std::string(kMemorySettings);
  return plan;
}

// Cuts the blocks of a lane to its fraction of its GPU's memory, if it has one.
absl::Status LimitBlocksToShare(Lane& lane, const RolloutMemoryOptions& options) {
  const std::optional<int64_t> share = ShareOf(lane, options);
  if (!share.has_value() || options.rank >= lane.ranks) return absl::OkStatus();
  Lane without_cache = lane;
  without_cache.blocks = {};
  TANDEM_ASSIGN_OR_RETURN(const MemoryPlan others, PlanLanes({without_cache}, options));
  const int64_t taken = others.device_bytes(DeviceOf(lane, options));
  const int64_t block_bytes = BlockBytes(lane, lane.ranks);
  if (LimitBlocks({{&lane, block_bytes}}, *share - taken)) return absl::OkStatus();
  return FieldError(
      absl::StatusCode::kResourceExhausted, lane.utilization_field(),
      absl::StrCat(*lane.options.gpu_memory_utilization, " of the GPU's memory is ",
                   Gigabytes(*share), ", but the ", lane.name, " takes ", Gigabytes(taken),
                   " without its KV cache, and ", Gigabytes(lane.fewest_blocks() * block_bytes),
                   " for that of one sequence of ", lane.longest_sequence(), " tokens (",
                   lane.length_field(), ") and of scoring; remedies: ", kMemorySettings));
}

// Cuts the blocks of lanes that share a memory to what is free there beside everything else. Lanes
// with a fraction of their own keep theirs.
absl::Status LimitBlocksToMemory(absl::Span<Lane* const> sharing, int64_t free,
                                 const RolloutMemoryOptions& options) {
  std::vector<Lane> without_cache;
  std::vector<CountedLane> counted;
  for (Lane* const lane : sharing) {
    without_cache.push_back(*lane);
    if (ShareOf(*lane, options).has_value()) continue;
    without_cache.back().blocks = {};
    if (options.rank < lane->ranks) counted.push_back({lane, BlockBytes(*lane, lane->ranks)});
  }
  if (counted.empty()) return absl::OkStatus();
  TANDEM_ASSIGN_OR_RETURN(const MemoryPlan others, PlanLanes(without_cache, options));
  const int64_t taken = options.on_host ? others.host_bytes()
                                        : others.device_bytes(DeviceOf(*sharing.front(), options));
  // Where this does not hold the fewest blocks, CheckFits compares what they need.
  LimitBlocks(counted, free - free / kFreeShare - taken);
  return absl::OkStatus();
}

// Cuts the blocks to the free memory, as far as it is known.
absl::Status LimitBlocksToMemory(std::vector<Lane>& lanes, const RolloutMemoryOptions& options) {
  std::array<std::vector<Lane*>, kDevicesOfRank> sharing;
  for (Lane& lane : lanes) {
    TANDEM_RETURN_IF_ERROR(LimitBlocksToShare(lane, options));
    sharing[static_cast<size_t>(DeviceOf(lane, options))].push_back(&lane);
  }
  for (size_t device = 0; device < sharing.size(); ++device) {
    const std::optional<int64_t> free =
        options.on_host ? options.free.host : options.free.devices[device];
    if (!free.has_value() || sharing[device].empty()) continue;
    TANDEM_RETURN_IF_ERROR(LimitBlocksToMemory(sharing[device], *free, options));
  }
  return absl::OkStatus();
}

// Returns the lanes with the blocks that the cache gets.
absl::StatusOr<std::vector<Lane>> PlanBlocks(const ModelConfig& senior, const ModelConfig* junior,
                                             const RolloutMemoryOptions& options) {
  TANDEM_ASSIGN_OR_RETURN(std::vector<Lane> lanes, MakeLanes(senior, junior, options));
  if (options.kv_cache_bytes > 0) {
    std::vector<CountedLane> counted;
    for (Lane& lane : lanes) counted.push_back({&lane, BlockBytes(lane, /*ranks=*/1)});
    if (!LimitBlocks(counted, options.kv_cache_bytes)) {
      return TooFewBytes(lanes, options.kv_cache_bytes);
    }
  } else {
    TANDEM_RETURN_IF_ERROR(LimitBlocksToMemory(lanes, options));
  }
  return lanes;
}

}  // namespace

RolloutMemoryOptions ToMemoryOptions(const EngineOptions& options, int64_t rank,
                                     const speculator::SpeculatorSize& speculator) {
  const auto lane = [&](const LaneOptions& one) {
    return LaneMemoryOptions{.max_model_len = one.max_model_len,
                             .storage = StorageOf(one, options),
                             .lora = one.lora,
                             .gpu_memory_utilization = one.gpu_memory_utilization,
                             .enforce_eager = one.enforce_eager};
  };
  const std::vector<int32_t>& junior_devices = options.layout.junior_gpu_devices;
  const bool has_own_device = rank < static_cast<int64_t>(junior_devices.size()) &&
                              junior_devices[static_cast<size_t>(rank)] != options.compute.gpu();
  return {.senior = lane(options.senior),
          .junior = lane(options.junior),
          .max_num_seqs = options.max_num_seqs,
          .max_batched_tokens = options.max_batched_tokens,
          .kv_cache_bytes = options.kv_cache_bytes,
          .product_rows = options.compute.product_rows,
          .blob_cache_bytes = options.blob_cache_bytes,
          .free = options.free_memory,
          .on_host = options.compute.device == "cpu",
          .junior_has_own_device = has_own_device,
          .layout = options.layout,
          .rank = rank,
          .shares_base_model = SharesBaseModel(options),
          .speculator = speculator};
}

absl::StatusOr<CacheBlocks> PlanCacheBlocks(const ModelConfig& senior, const ModelConfig* junior,
                                            const RolloutMemoryOptions& options) {
  TANDEM_ASSIGN_OR_RETURN(const std::vector<Lane> lanes, PlanBlocks(senior, junior, options));
  CacheBlocks result = {.senior = lanes[0].blocks, .junior = {}};
  if (junior != nullptr) result.junior = lanes[1].blocks;
  return result;
}

absl::StatusOr<MemoryPlan> RolloutMemory(const ModelConfig& senior, const ModelConfig* junior,
                                         const RolloutMemoryOptions& options) {
  TANDEM_ASSIGN_OR_RETURN(const std::vector<Lane> lanes, PlanBlocks(senior, junior, options));
  return PlanLanes(lanes, options);
}

}  // namespace tandem::rollout
