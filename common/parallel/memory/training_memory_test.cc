#include "common/parallel/memory/training_memory.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "common/base/errors/error.h"
#include "common/model/testing/image_batches.h"
#include "common/model/testing/tiny_model_dir.h"
#include "common/ops/products/packed_weight.h"
#include "common/parallel/create_strategy.h"
#include "common/parallel/testing/memory_meter.h"
#include "common/parallel/testing/strategy_runs.h"
#include "common/parallel/testing/zero_of_stage.h"
#include "common/ranks/testing/rank_processes.h"
#include "common/tensor/aten/aten_bytes.h"

namespace tandem::parallel {
namespace {

// Wide enough for what the plan leaves out (indices, rotations, buffers' rounding) to be small.
const nlohmann::json kShape = {
    {"vocab_size", 512},      {"hidden_size", 64},         {"intermediate_size", 160},
    {"num_hidden_layers", 4}, {"num_attention_heads", 4},  {"num_key_value_heads", 2},
    {"head_dim", 16},         {"initializer_range", 0.02}, {"max_position_embeddings", 512},
    {"q_lora_rank", 24},      {"kv_lora_rank", 32},        {"qk_nope_head_dim", 16},
    {"qk_rope_head_dim", 8},  {"v_head_dim", 16},          {"moe_intermediate_size", 160},
    {"num_experts", 6}};
constexpr int64_t kTokens = 512;  // of a micro-batch
constexpr int64_t kMicroBatches = 8;

ModelConfig Config(const nlohmann::json& changes = nlohmann::json::object()) {
  nlohmann::json shape = kShape;
  shape.merge_patch(changes);
  return TinyConfig("llama", shape);
}

std::map<std::string, int64_t> Items(const absl::StatusOr<MemoryPlan>& plan) {
  std::map<std::string, int64_t> items;
  for (const MemoryPlan::Item& item : plan.value().items) items[item.name] = item.bytes;
  return items;
}

StrategyOptions Single(Recompute recompute = Recompute::kNone) {
  return {.name = "single", .recompute_granularity = recompute};
}

StrategyOptions Zero(const ZeroOptions& zero, Recompute recompute = Recompute::kNone) {
  return {.name = "zero", .recompute_granularity = recompute, .zero = zero};
}

StrategyOptions ZeroWithoutOverlap() {
  StrategyOptions options = Zero(ZeroOfStage(3));
  options.zero.overlap_comm = false;
  return options;
}

// With the distributed optimizer.
StrategyOptions Megatron(MegatronOptions megatron, Recompute recompute = Recompute::kNone) {
  megatron.use_distributed_optimizer = true;
  return {.name = "megatron", .recompute_granularity = recompute, .megatron = megatron};
}

struct Case {
  const char* name;
  int ranks;
  StrategyOptions options;
  bool tied = false;
  std::vector<std::string> freeze = {};
  DType dtype = DType::kFloat32;
  const char* family = "llama";
  DType weight_dtype = DType::kFloat32;
  bool freeze_all = false;
  LoraOptions lora = {};
  bool shared_prefixes = false;
  kernels::WeightFormat weight_format = kernels::WeightFormat::kDense;
  DType activation_dtype = DType::kFloat32;
};

Case Adapted(const char* name, int ranks, const StrategyOptions& options,
             const char* family = "llama") {
  return {.name = name,
          .ranks = ranks,
          .options = options,
          .family = family,
          .lora = {.rank = 4, .alpha = 8, .target_modules = {kAllLinear}}};
}

Case Packed(const char* name, int ranks, const StrategyOptions& options,
            kernels::WeightFormat format, const char* family = "llama") {
  Case packed = Adapted(name, ranks, options, family);
  packed.weight_format = format;
  return packed;
}

// The bytes of the packed matrices that a rank holds.
int64_t PackedBytesOf(const Model& model) {
  std::map<const ops::PackedWeight*, int64_t> bytes;
  for (const Parameter& parameter : model.DeclaredParameters()) {
    const ops::PackedWeight* const packed = parameter.packed.get();
    if (packed == nullptr) continue;
    bytes[packed] = kernels::PackedBytes(packed->format(), packed->out(), packed->in());
  }
  int64_t sum = 0;
  for (const auto& [packed, of_one] : bytes) sum += of_one;
  return sum;
}

Case Frozen(const char* name, int ranks, const StrategyOptions& options,
            DType dtype = DType::kFloat32) {
  return {.name = name, .ranks = ranks, .options = options, .dtype = dtype, .freeze_all = true};
}

// With weights rounded to bfloat16.
Case Rounded(const char* name, int ranks, const StrategyOptions& options, bool tied = false) {
  return {.name = name,
          .ranks = ranks,
          .options = options,
          .tied = tied,
          .weight_dtype = DType::kBFloat16};
}

// With inputs of linear maps rounded to bfloat16, too.
Case RoundedInputs(const char* name, int ranks, const StrategyOptions& options) {
  Case rounded = Rounded(name, ranks, options);
  rounded.activation_dtype = DType::kBFloat16;
  return rounded;
}

Case Shared(const char* name, int ranks, const StrategyOptions& options,
            const char* family = "llama") {
  return {
      .name = name, .ranks = ranks, .options = options, .family = family, .shared_prefixes = true};
}

// Returns eight sequences of kTokens rows in all, which have half of these in common.
RaggedBatch SharedBatch() {
  std::vector<std::vector<int64_t>> sequences;
  for (int64_t s = 0; s < 8; ++s) {
    std::vector<int64_t>& tokens = sequences.emplace_back();
    for (int64_t t = 0; t < kTokens / 2; ++t) tokens.push_back((7 + 31 * t) % 512);
    for (int64_t t = 0; t < kTokens / 16; ++t) tokens.push_back((s + 29 * t) % 512);
  }
  std::vector<int64_t> starts(8, kTokens / 2);
  starts[0] = 0;
  return MakeRaggedBatch(sequences, at::kCPU, starts);
}

class TrainingMemoryTest : public testing::TestWithParam<Case> {};

// The plan beside libtorch's own count, on every rank: what stays is met, and what a step takes
// beside it is an upper estimate of at most twice as much.
TEST_P(TrainingMemoryTest, IsTheMemoryThatARankTakes) {
  const Case& c = GetParam();
  const TemporaryFolder folder;
  ranks::RunConnected(c.ranks, [&](const std::shared_ptr<ranks::Communicator>& ranks) {
    nlohmann::json shape = kShape;
    shape["tie_word_embeddings"] = c.tied;
    const std::string directory = folder / ("model" + std::to_string(ranks->rank()));
    if (std::string(c.family).ends_with("_vl")) {
      shape["rope_scaling"] = {{"type", "mrope"}, {"mrope_section", {2, 3, 3}}};
    }
    WriteTinyModel(directory, 3, shape, c.family);
    const ModelConfig config = LoadModelConfig(directory).value();
    auto items = Items(TrainingMemory(c.options,
                                      {.config = config,
                                       .freeze = c.freeze,
                                       .lora = c.lora,
                                       .freeze_all = c.freeze_all,
                                       .dtype = c.dtype,
                                       .weight_dtype = c.weight_dtype,
                                       .weight_format = c.weight_format,
                                       .activation_dtype = c.activation_dtype,
                                       .shared_prefixes = c.shared_prefixes},
                                      kTokens, ranks->rank(), ranks->size()));

    MemoryMeter meter;
    const auto strategy = CreateStrategy(c.options, ranks).value();
    Prepare(*strategy, directory,
            {.freeze = c.freeze,
             .freeze_all = c.freeze_all,
             .lora = c.lora,
             .placement = {.dtype = ToScalarType(c.dtype),
                           .weight_format = c.weight_format,
                           .weight_dtype = ToScalarType(c.weight_dtype),
                           .activation_dtype = ToScalarType(c.activation_dtype)}});
    const auto input = [&](int64_t) {
      if (c.shared_prefixes) return SharedBatch();
      std::vector<int64_t> half;  // of tokens that choose different experts
      for (int64_t t = 0; t < kTokens / 2; ++t) half.push_back((7 + 31 * t) % 512);
      // With a vision tower, each is an image but for its first token.
      return MakeBatchWithLargeImages(strategy->model(), {half, half}, {.grid = {1, 30, 34}});
    };
    const auto step = [&] {
      if (c.freeze_all) {
        ASSERT_TRUE(strategy
                        ->Forward(kMicroBatches, input,
                                  [](int64_t, const RaggedBatch&, const at::Tensor&) {
                                    return absl::StatusOr<std::vector<double>>(1);
                                  })
                        .ok());
        return;
      }
      const absl::Status status = strategy->ForwardBackward(
          kMicroBatches, input, [](int64_t, const RaggedBatch&, const at::Tensor& hidden) {
            return absl::StatusOr<at::Tensor>(at::ones_like(hidden.detach()));
          });
      ASSERT_TRUE(status.ok()) << status;
      ASSERT_TRUE(strategy->OptimizerStep({}).ok());
    };
    step();
    EXPECT_EQ(PackedBytesOf(strategy->model()), items["packed_weights"]);
    EXPECT_EQ(items["packed_weights"] > 0, c.weight_format != kernels::WeightFormat::kDense);
    const int64_t state = items["weights"] + items["compute_copy"] + items["gradients"] +
                          items["optimizer"] + items["rotary_tables"];
    // The rest that the plan leaves out weighs more beside a frozen model, a quarter of the state.
    const bool is_frozen = c.freeze_all || c.lora.enabled();
    const auto left_out = (is_frozen ? 0.08 : 0.02) * static_cast<double>(state);
    // A thread of the process group may hold what was summed a moment longer than the call.
    for (int waits = 0; waits < 1000 && meter.held_bytes() > state + left_out; ++waits) {
      absl::SleepFor(absl::Milliseconds(5));
    }
    EXPECT_NEAR(static_cast<double>(meter.held_bytes()), static_cast<double>(state), left_out);

    meter.ResetPeak();
    const int64_t before = meter.held_bytes();
    step();
    const int64_t taken = meter.peak_bytes() - before;
    const int64_t planned = items["activations"] + items["vision_activations"] +
                            items["gathered_weights"] + items["whole_gradients"] +
                            items["shared_keys"];
    EXPECT_EQ(items["shared_keys"] > 0, c.shared_prefixes);
    EXPECT_LE(taken, planned);
    EXPECT_GE(taken, planned / 2);
  });
}

INSTANTIATE_TEST_SUITE_P(
    All, TrainingMemoryTest,
    testing::Values(
        Case{"Single", 1, Single()}, Case{"SingleFull", 1, Single(Recompute::kFull)},
        Case{"SingleBfloat16", 1, Single(), false, {}, DType::kBFloat16},
        Case{"SingleFrozen", 1, Single(), false, {"model.embed_tokens*", "model.layers.0.*"}},
        Case{"Zero1", 2, Zero(ZeroOfStage(1))}, Case{"Zero2", 2, Zero(ZeroOfStage(2))},
        Case{"Zero2Tied", 2, Zero(ZeroOfStage(2)), true}, Case{"Zero3", 2, Zero(ZeroOfStage(3))},
        Case{"Zero3NoOverlap", 2, ZeroWithoutOverlap()},
        Case{"Zero3Full", 2, Zero(ZeroOfStage(3), Recompute::kFull)},
        Case{"Zero3Bfloat16", 2, Zero(ZeroOfStage(3)), false, {}, DType::kBFloat16},
        Adapted("SingleAdapters", 1, Single()),
        Adapted("SingleAdaptersMixtral", 1, Single(), "mixtral"),
        Adapted("Zero2Adapters", 2, Zero(ZeroOfStage(2))),
        Adapted("Zero3Adapters", 2, Zero(ZeroOfStage(3))),
        Adapted("Tp2Adapters", 2, Megatron({.tensor_model_parallel_size = 2})),
        Packed("SinglePackedBfloat16", 1, Single(), kernels::WeightFormat::kBfloat16),
        Packed("SinglePackedFull", 1, Single(Recompute::kFull), kernels::WeightFormat::kInt8),
        Packed("SinglePackedInt8", 1, Single(), kernels::WeightFormat::kInt8, "qwen3_moe"),
        Packed("Zero2PackedInt8", 2, Zero(ZeroOfStage(2)), kernels::WeightFormat::kInt8),
        Packed("Tp2PackedInt4", 2, Megatron({.tensor_model_parallel_size = 2}),
               kernels::WeightFormat::kInt4),
        Shared("SingleShared", 1, Single()),
        Shared("SingleSharedLatent", 1, Single(Recompute::kFull), "deepseek_v3"),
        Shared("Zero3Shared", 2, Zero(ZeroOfStage(3))),
        Shared("Tp2Shared", 2, Megatron({.tensor_model_parallel_size = 2})),
        Frozen("SingleFrozenWhole", 1, Single()),
        Frozen("SingleFrozenWholeBfloat16", 1, Single(), DType::kBFloat16),
        Frozen("Zero1FrozenWhole", 2, Zero(ZeroOfStage(1))),
        Frozen("Zero3FrozenWhole", 2, Zero(ZeroOfStage(3))),
        Frozen("TensorFrozenWhole", 2, Megatron({.tensor_model_parallel_size = 2})),
        Frozen("PipelineFrozenWhole", 2, Megatron({.pipeline_model_parallel_size = 2})),
        Rounded("SingleRounded", 1, Single()), Rounded("SingleRoundedTied", 1, Single(), true),
        Rounded("Zero2Rounded", 2, Zero(ZeroOfStage(2))),
        RoundedInputs("SingleRoundedInputs", 1, Single()),
        RoundedInputs("Zero2RoundedInputs", 2, Zero(ZeroOfStage(2))),
        RoundedInputs("Tp2RoundedInputs", 2, Megatron({.tensor_model_parallel_size = 2})),
        Rounded("Zero3Rounded", 2, Zero(ZeroOfStage(3))),
        Rounded("Zero3RoundedTied", 2, Zero(ZeroOfStage(3)), true),
        Rounded("Tp2Rounded", 2, Megatron({.tensor_model_parallel_size = 2})),
        Rounded("Pp2Rounded", 2, Megatron({.pipeline_model_parallel_size = 2})),
        Case{"Dp2", 2, Megatron({})}, Case{"Dp2Replicated", 2, StrategyOptions{.name = "megatron"}},
        Case{"Tp2", 2, Megatron({.tensor_model_parallel_size = 2})},
        Case{"SingleMistral", 1, Single(), false, {}, DType::kFloat32, "mistral"},
        Case{"SingleOlmo2", 1, Single(), false, {}, DType::kFloat32, "olmo2"},
        Case{"Tp2Olmo2",
             2,
             Megatron({.tensor_model_parallel_size = 2}),
             false,
             {},
             DType::kFloat32,
             "olmo2"},
        Case{"SingleMixtral", 1, Single(), false, {}, DType::kFloat32, "mixtral"},
        Case{"SingleQwen2Moe", 1, Single(), false, {}, DType::kFloat32, "qwen2_moe"},
        Case{"Tp2Qwen3Moe",
             2,
             Megatron({.tensor_model_parallel_size = 2}),
             false,
             {},
             DType::kFloat32,
             "qwen3_moe"},
        Case{"Ep2Qwen3Moe",
             2,
             Megatron({.expert_model_parallel_size = 2}),
             false,
             {},
             DType::kFloat32,
             "qwen3_moe"},
        Case{"Ep2Cp2Mixtral",
             2,
             Megatron({.context_parallel_size = 2, .expert_model_parallel_size = 2}),
             true,
             {},
             DType::kFloat32,
             "mixtral"},
        Case{"Ep2Qwen2MoeReplicated",
             4,
             {.name = "megatron",
              .recompute_granularity = Recompute::kNone,
              .megatron = {.expert_model_parallel_size = 2}},
             false,
             {},
             DType::kFloat32,
             "qwen2_moe"},
        Case{"SingleDeepseek", 1, Single(), false, {}, DType::kFloat32, "deepseek_v3"},
        Case{"SingleDeepseekBfloat16", 1, Single(), false, {}, DType::kBFloat16, "deepseek_v3"},
        Case{"SingleDeepseekRounded",
             1,
             Single(),
             false,
             {},
             DType::kFloat32,
             "deepseek_v3",
             DType::kBFloat16},
        Case{"Tp2Deepseek",
             2,
             Megatron({.tensor_model_parallel_size = 2}),
             false,
             {},
             DType::kFloat32,
             "deepseek_v3"},
        Case{"SingleGemma2", 1, Single(), false, {}, DType::kFloat32, "gemma2"},
        Case{"SingleGemma3", 1, Single(), false, {}, DType::kFloat32, "gemma3_text"},
        Case{"Tp2Gemma3",
             2,
             Megatron({.tensor_model_parallel_size = 2}),
             false,
             {},
             DType::kFloat32,
             "gemma3_text"},
        Case{"SingleQwen2Vl", 1, Single(), false, {}, DType::kFloat32, "qwen2_vl"},
        Case{"SingleQwen25Vl", 1, Single(), false, {}, DType::kFloat32, "qwen2_5_vl"},
        Case{"SingleFrozenTower", 1, Single(), false, {"visual.*"}, DType::kFloat32, "qwen2_5_vl"},
        Case{"Pp2Qwen2Vl",
             2,
             Megatron({.pipeline_model_parallel_size = 2}),
             false,
             {},
             DType::kFloat32,
             "qwen2_vl"},
        Case{"Tp2Full", 2, Megatron({.tensor_model_parallel_size = 2}, Recompute::kFull)},
        Case{"Cp2", 2, Megatron({.context_parallel_size = 2})},
        Case{"Pp2", 2, Megatron({.pipeline_model_parallel_size = 2})},
        Case{"Pp2Tied", 2, Megatron({.pipeline_model_parallel_size = 2}), true},
        Case{"Pp2Vpp2", 2,
             Megatron({.pipeline_model_parallel_size = 2,
                       .virtual_pipeline_model_parallel_size = 2})}),
    [](const testing::TestParamInfo<Case>& info) { return std::string(info.param.name); });

TEST(TrainingMemoryPlanTest, RecomputingLayersTakesLess) {
  const ModelConfig config = Config();
  for (const StrategyOptions& kept :
       {Single(), Zero(ZeroOfStage(3)), Megatron({.tensor_model_parallel_size = 2})}) {
    StrategyOptions recomputed = kept;
    recomputed.recompute_granularity = Recompute::kFull;
    auto before = Items(TrainingMemory(kept, {.config = config}, 100, 0, 2));
    auto after = Items(TrainingMemory(recomputed, {.config = config}, 100, 0, 2));
    // Four layers keep their inputs, and one is computed again.
    EXPECT_LT(after["activations"], before["activations"] * 6 / 10) << kept.name;
    EXPECT_EQ(after["weights"], before["weights"]);
  }
}

TEST(TrainingMemoryPlanTest, CriticsHaveAValueHead) {
  const ModelConfig config = Config();
  const auto bytes = [&](HeadKind head) {
    return Items(TrainingMemory(Single(), {.config = config, .head = head}, 1, 0, 1))["weights"];
  };
  EXPECT_EQ(bytes(HeadKind::kLm) - bytes(HeadKind::kValue), 4 * (512 - 1) * 64);
}

TEST(TrainingMemoryPlanTest, EveryFamilyCountsItsParameters) {
  for (const std::string& family : EveryFamily()) {
    const nlohmann::json changes = {{"attention_bias", true}, {"mlp_bias", true}};
    const ModelConfig config = TinyConfig(family, changes);
    auto items = Items(TrainingMemory(Single(), {.config = config, .freeze = {"*norm*"}}, 1, 0, 1));
    int64_t bytes = 0, trained = 0;
    for (const auto& [name, tensor] : TinyModel(family, changes)->Parameters()) {
      bytes += static_cast<int64_t>(tensor.nbytes());
      const bool trains = name.find("norm") == std::string::npos &&
                          name.find("e_score_correction_bias") == std::string::npos;
      if (trains) trained += static_cast<int64_t>(tensor.nbytes());
    }
    EXPECT_EQ(items["weights"], bytes) << family;
    EXPECT_EQ(items["gradients"], trained);
    EXPECT_EQ(items["optimizer"], 2 * trained);
  }
}

TEST(TrainingMemoryPlanTest, Bfloat16HasACopyOfWhatIsMultiplied) {
  const ModelConfig config = Config();
  auto items =
      Items(TrainingMemory(Single(), {.config = config, .dtype = DType::kBFloat16}, 1, 0, 1));
  int64_t multiplied = 0;
  for (const auto& [name, tensor] : TinyModel("llama", kShape)->Parameters()) {
    if (tensor.dim() == 2 && name != kEmbeddingName) multiplied += tensor.numel();
  }
  EXPECT_EQ(items["compute_copy"], 2 * multiplied);
  items = Items(
      TrainingMemory(Single(), {.config = config, .weight_dtype = DType::kBFloat16}, 1, 0, 1));
  EXPECT_EQ(items["compute_copy"], 4 * multiplied);
  items = Items(TrainingMemory(
      Single(),
      {.config = config, .weight_dtype = DType::kBFloat16, .activation_dtype = DType::kBFloat16}, 1,
      0, 1));
  EXPECT_EQ(items["compute_copy"], 2 * multiplied);
}

TEST(TrainingMemoryPlanTest, RowsThatAttendByThemselvesHaveKeysAndValuesInBlocks) {
  const ModelConfig config = Config();
  const auto bytes = [&](int64_t product_rows, int64_t tokens) {
    return Items(TrainingMemory(Single(),
                                {.config = config,
                                 .dtype = DType::kBFloat16,
                                 .on_host = false,
                                 .product_rows = product_rows},
                                tokens, 0, 1))["attention_blocks"];
  };
  EXPECT_EQ(bytes(0, 100), 0);
  const int64_t numbers = 2 * config.num_key_value_heads * config.head_dim;  // of a token
  EXPECT_EQ(bytes(256, 100) - bytes(256, 0), 2 * 100 * numbers * 2);
}

TEST(TrainingMemoryPlanTest, AnOffloadedOptimizerIsOnTheHost) {
  const ModelConfig config = Config();
  ZeroOptions offloaded = ZeroOfStage(2);
  offloaded.offload_optimizer = true;
  const auto plan =
      TrainingMemory(Zero(offloaded), {.config = config, .on_host = false}, 100, 0, 2).value();
  auto items = Items(plan);
  EXPECT_EQ(plan.host_bytes(), items["optimizer_and_masters"]);
  EXPECT_EQ(plan.host_bytes(), 3 * items["weights"] / 2) << "moments and masters of a half";
}

TEST(TrainingMemoryPlanTest, BadFreezePatternsAndFamiliesAreRefused) {
  ModelConfig config = Config();
  EXPECT_EQ(
      FieldPath(TrainingMemory(Single(), {.config = config, .freeze = {"x"}}, 1, 0, 1).status()),
      "freeze[0]");
  config.model_type = "gpt2";
  EXPECT_EQ(TrainingMemory(Single(), {.config = config}, 1, 0, 1).status().code(),
            absl::StatusCode::kUnimplemented);
}

// Weights and two moments, float32, of what a rank writes.
TEST(CheckpointCopyTest, IsTwelveBytesForEachTrainedValueDividedAmongTheRanks) {
  const ModelConfig config = Config();
  const auto copied = [&](const StrategyOptions& options, const TrainedModel& model,
                          int64_t ranks) {
    const MemoryPlan plan = TrainingMemory(options, model, kTokens, 0, ranks).value();
    return CheckpointCopyBytes(options, model, plan, ranks).value();
  };
  const TrainedModel model = {.config = config};
  const int64_t values =
      Items(TrainingMemory(Single(), model, kTokens, 0, 1)).at("weights") / sizeof(float);
  EXPECT_EQ(copied(Single(), model, 1), 12 * values);
  // Shards of blocks are rounded up.
  EXPECT_NEAR(copied(Zero(ZeroOfStage(3)), model, 4), 3 * values, 100);
  const TrainedModel frozen = {.config = config, .freeze = {"model.embed_tokens.*"}};
  const int64_t embedding = 512 * 64;
  EXPECT_EQ(copied(Single(), frozen, 1), 12 * (values - embedding));
  // Every rank writes its part of what is frozen, too.
  EXPECT_NEAR(copied(Zero(ZeroOfStage(3)), frozen, 4), 3 * values - 2 * embedding, 600);
  const TrainedModel all_frozen = {.config = config, .freeze_all = true};
  EXPECT_EQ(copied(Single(), all_frozen, 1), 0);
}

}  // namespace
}  // namespace tandem::parallel
