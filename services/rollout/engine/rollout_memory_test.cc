#include "services/rollout/engine/rollout_memory.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <string>
#include <utility>

#include "common/base/errors/error.h"
#include "common/kernels/paged_plan.h"
#include "common/model/config/rope_config.h"
#include "common/model/passes/decode_shape.h"
#include "common/model/testing/models.h"
#include "common/weights/word_sums.h"
#include "services/rollout/engine/models/model_runner.h"

namespace tandem::rollout {
namespace {

using kernels::WeightFormat;

std::map<std::string, int64_t> Items(const MemoryPlan& plan) {
  std::map<std::string, int64_t> items;
  for (const MemoryPlan::Item& item : plan.items) items[item.name] = item.bytes;
  return items;
}

// Returns the bytes of some blocks of the tiny model's cache: keys and values of two layers.
int64_t CacheBytes(int64_t blocks) {
  const KvCache cache(TinyModel()->CacheLayout(), blocks);
  return 2 * 2 * static_cast<int64_t>(cache.keys(0).nbytes());
}

LaneMemoryOptions Lane(int64_t max_model_len, DType dtype = DType::kFloat32,
                       WeightFormat format = WeightFormat::kDense) {
  return {.max_model_len = max_model_len,
          .storage = {.dtype = dtype, .weight_format = format, .cache_dtype = dtype}};
}

TEST(RolloutMemoryTest, EveryLaneHasACacheOfItsOwnLength) {
  const ModelConfig senior = TinyConfig();
  const ModelConfig junior = TinyConfig("qwen3", {{"max_position_embeddings", 100}});
  RolloutMemoryOptions options = {
      .senior = Lane(200), .junior = Lane(200), .max_num_seqs = 5, .max_batched_tokens = 64};
  auto items = Items(RolloutMemory(senior, &junior, options).value());
  const int64_t block = CacheBytes(1);
  // Five sequences of 200 tokens, four blocks each, and one more that is scored.
  EXPECT_EQ(items["senior_kv_cache"], (5 * 4 + 4) * block);
  EXPECT_EQ(items["junior_kv_cache"], (5 * 2 + 2) * block) << "the model's own limit";
  EXPECT_EQ(items["senior_weights"], 4 * TinyModel()->num_parameters());
  options.junior.max_model_len = 50;
  items = Items(RolloutMemory(senior, &junior, options).value());
  EXPECT_EQ(items["senior_kv_cache"], (5 * 4 + 4) * block);
  EXPECT_EQ(items["junior_kv_cache"], (5 * 1 + 1) * block);
}

// A window of five tokens lies in two blocks at most, and a pass adds a third to each sequence; one
// more holds the tokens of a pass.
TEST(RolloutMemoryTest, SequencesWithWindowsNeedTheirBlocksAlone) {
  const RolloutMemoryOptions options = {
      .senior = Lane(1000), .junior = {}, .max_num_seqs = 5, .max_batched_tokens = 64};
  const nlohmann::json positions = {{"max_position_embeddings", 1000}};
  const ModelConfig mistral = TinyConfig("mistral", positions);
  const auto bytes = [&](const ModelConfig& config) {
    return Items(RolloutMemory(config, nullptr, options).value())["senior_kv_cache"];
  };
  const int64_t longest = 16;  // blocks of 1000 tokens, which the scorer has
  EXPECT_EQ(bytes(mistral), (5 * 3 + 1 + longest) * CacheBytes(1));
  EXPECT_EQ(bytes(TinyConfig("llama", positions)), (5 * longest + longest) * CacheBytes(1));
  // A single sequence still fits as a whole: its prefix may be in the cache.
  RolloutMemoryOptions one = options;
  one.max_num_seqs = 1;
  EXPECT_EQ(PlanCacheBlocks(mistral, nullptr, one)->senior.generator, longest);
}

// A token of a latent takes (kv_lora_rank + qk_rope_head_dim) numbers a layer, however many heads
// there are and ranks share them.
TEST(RolloutMemoryTest, TheCacheOfLatentAttentionFollowsItsFormula) {
  const ModelConfig config =
      TinyConfig("deepseek_v3", {{"vocab_size", 62},
                                 {"intermediate_size", 44},
                                 {"max_position_embeddings", 1000},
                                 {"first_k_dense_replace", 2}});  // no routing beside the latents
  RolloutMemoryOptions options = {
      .senior = Lane(1000), .junior = {}, .max_num_seqs = 5, .max_batched_tokens = 64};
  const int64_t tokens = (5 * 16 + 16) * 64, layers = 2, width = 13 + 6;
  for (const int64_t ranks : {1, 2}) {
    options.layout.tensor_parallel_size = ranks;
    for (const auto& [dtype, bytes] : {std::pair{DType::kFloat32, 4}, {DType::kBFloat16, 2}}) {
      options.senior.storage.cache_dtype = dtype;
      EXPECT_EQ(Items(RolloutMemory(config, nullptr, options).value())["senior_kv_cache"],
                tokens * layers * width * bytes);
    }
  }
}

TEST(RolloutMemoryTest, BothLanesHaveAsManyBlocksOfTheBytes) {
  const ModelConfig config = TinyConfig();
  const int64_t block = CacheBytes(1);
  RolloutMemoryOptions options = {.senior = Lane(200),
                                  .junior = Lane(200),
                                  .max_num_seqs = 5,
                                  .max_batched_tokens = 64,
                                  .kv_cache_bytes = 2 * 9 * block + 1};
  auto items = Items(RolloutMemory(config, &config, options).value());
  EXPECT_EQ(items["senior_kv_cache"], 9 * block);
  EXPECT_EQ(items["junior_kv_cache"], 9 * block);
  const CacheBlocks blocks = PlanCacheBlocks(config, nullptr, options).value();
  EXPECT_EQ(blocks.senior.generator, 14);
  EXPECT_EQ(blocks.senior.scorer, 4);
  // A junior with short sequences leaves the rest to the senior: five blocks and one for scores.
  options.junior.max_model_len = 50;
  items = Items(RolloutMemory(config, &config, options).value());
  EXPECT_EQ(items["junior_kv_cache"], 6 * block);
  EXPECT_EQ(items["senior_kv_cache"], (2 * 9 - 6) * block);
  options.junior.max_model_len = 200;
  options.kv_cache_bytes = 1000 * block;
  EXPECT_EQ(PlanCacheBlocks(config, &config, options)->senior.generator, 5 * 4)
      << "no more than can be used";
  // Four blocks of one sequence, and four of one that is scored.
  options.kv_cache_bytes = 2 * 8 * block - 1;
  const absl::Status status = RolloutMemory(config, &config, options).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(FieldPath(status), "kv_cache_bytes") << status;
}

TEST(RolloutMemoryTest, EveryLaneHasATypeOfItsOwn) {
  const ModelConfig config = TinyConfig();
  RolloutMemoryOptions options = {
      .senior = Lane(100), .junior = Lane(100), .max_num_seqs = 5, .max_batched_tokens = 64};
  auto whole = Items(RolloutMemory(config, &config, options).value());
  options.junior = Lane(100, DType::kBFloat16);
  auto half = Items(RolloutMemory(config, &config, options).value());
  EXPECT_EQ(half["senior_weights"], whole["senior_weights"]);
  EXPECT_EQ(half["junior_weights"], whole["junior_weights"] / 2);
  EXPECT_EQ(half["senior_kv_cache"], whole["senior_kv_cache"]);
  EXPECT_EQ(half["junior_kv_cache"], whole["junior_kv_cache"] / 2);
  EXPECT_EQ(half["staged_weight_update"], whole["staged_weight_update"]);
  EXPECT_EQ(half["activations"], whole["activations"]) << "the larger one of the two lanes";
  EXPECT_FALSE(Items(RolloutMemory(config, nullptr, options).value()).contains("junior_weights"));
}

TEST(RolloutMemoryTest, EveryLaneKeepsTheTablesOfItsRotation) {
  const ModelConfig senior = TinyConfig(), junior = TinyConfig("gemma3_text");
  RolloutMemoryOptions options = {
      .senior = Lane(200), .junior = Lane(200), .max_num_seqs = 5, .max_batched_tokens = 64};
  const auto bytes = [&](const ModelConfig* beside) {
    return Items(RolloutMemory(senior, beside, options).value())["rotary_tables"];
  };
  EXPECT_EQ(bytes(nullptr), RotaryTableBytes(senior, 200));
  EXPECT_EQ(bytes(&junior), RotaryTableBytes(senior, 200) + RotaryTableBytes(junior, 200));
  options.layout.tensor_parallel_size = 2;
  options.rank = 1;  // holds the senior alone
  EXPECT_EQ(bytes(&junior), RotaryTableBytes(senior, 200));
}

TEST(RolloutMemoryTest, GraphsAreCountedWhereALaneHasThem) {
  const ModelConfig config = TinyConfig();
  RolloutMemoryOptions options = {
      .senior = Lane(200), .junior = Lane(100), .max_num_seqs = 5, .max_batched_tokens = 64};
  options.on_host = false;
  auto eager = Items(RolloutMemory(config, &config, options).value());
  EXPECT_FALSE(eager.contains("senior_graphs"));
  options.senior.enforce_eager = false;
  auto items = Items(RolloutMemory(config, &config, options).value());
  EXPECT_FALSE(items.contains("junior_graphs"));
  // The buffers of a pass of the most rows, and more than four times what 64 rows compute.
  const int64_t buffers =
      DecodeLayout({.rows = kMaxDecodeRows, .wanted = kMaxDecodeRows},
                   AttentionPlans(TinyModel()->CacheLayout(), config.num_attention_heads),
                   /*max_tokens=*/200, kDrawNumbers)
          .bytes;
  EXPECT_GT(
      items["senior_graphs"],
      buffers + 4 * 64 * FindFamily("llama").value()->InferenceActivations(config, 1, false) * 4);
  items.erase("senior_graphs");
  EXPECT_EQ(items, eager) << "the rest is as it was";
}

TEST(RolloutMemoryTest, KeysAndValuesHaveATypeOfTheirOwn) {
  const ModelConfig config = TinyConfig();
  RolloutMemoryOptions options = {
      .senior = Lane(200), .junior = Lane(200), .max_num_seqs = 5, .max_batched_tokens = 64};
  auto whole = Items(RolloutMemory(config, &config, options).value());
  options.senior.storage.cache_dtype = options.junior.storage.cache_dtype = DType::kBFloat16;
  auto half = Items(RolloutMemory(config, &config, options).value());
  const KvCache cache(TinyModel()->CacheLayout(), 5 * 4 + 4, at::kCPU, at::kBFloat16);
  EXPECT_EQ(half["senior_kv_cache"], 2 * 2 * static_cast<int64_t>(cache.keys(0).nbytes()));
  EXPECT_EQ(half["junior_kv_cache"], whole["junior_kv_cache"] / 2);
  for (const char* item : {"senior_weights", "junior_weights", "activations", "logits"}) {
    EXPECT_EQ(half[item], whole[item]) << item;
  }
  // The same bytes hold twice the blocks.
  options.kv_cache_bytes = 2 * 9 * CacheBytes(1);
  EXPECT_EQ(PlanCacheBlocks(config, &config, options)->senior.total(), 18);
}

// Options of lanes whose caches want 24 and 12 blocks and need at least 8 and 4.
RolloutMemoryOptions TwoLanes() {
  return {.senior = Lane(200), .junior = Lane(100), .max_num_seqs = 5, .max_batched_tokens = 64};
}

// Returns the memory that has room for `blocks` blocks beside `others` bytes and a tenth of itself.
int64_t MemoryLeaving(int64_t others, int64_t blocks) {
  return (others + blocks * CacheBytes(1)) * 10 / 9 + 1;
}

// Returns the available memory that leaves `blocks` blocks beside everything else.
int64_t MemoryFor(const ModelConfig& config, const RolloutMemoryOptions& options, int64_t blocks) {
  const MemoryPlan plan = RolloutMemory(config, &config, options).value();
  auto items = Items(plan);
  const int64_t others = plan.host_bytes() - items["senior_kv_cache"] - items["junior_kv_cache"];
  return MemoryLeaving(others, blocks);
}

TEST(RolloutMemoryTest, WithoutASizeTheCacheTakesWhatTheMemoryLeaves) {
  const ModelConfig config = TinyConfig();
  const auto blocks_in = [&](int64_t blocks) {
    RolloutMemoryOptions options = TwoLanes();
    options.free.host = MemoryFor(config, options, blocks);
    const CacheBlocks planned = PlanCacheBlocks(config, &config, options).value();
    const MemoryPlan plan = RolloutMemory(config, &config, options).value();
    EXPECT_EQ(plan.items[1].bytes, planned.senior.total() * CacheBytes(1));
    EXPECT_EQ(CheckFits(plan, options.free).ok(), blocks >= 12) << blocks;
    return std::pair(planned.senior.total(), planned.junior.total());
  };
  EXPECT_EQ(blocks_in(1000), std::pair(24L, 12L)) << "no more than can be used";
  EXPECT_EQ(blocks_in(36), std::pair(24L, 12L));
  EXPECT_EQ(blocks_in(35), std::pair(23L, 12L));
  EXPECT_EQ(blocks_in(20), std::pair(10L, 10L)) << "as many for either lane";
  EXPECT_EQ(blocks_in(14), std::pair(8L, 6L)) << "a longest sequence of each lane";
  EXPECT_EQ(blocks_in(12), std::pair(8L, 4L));
  // Too little: the plan of the smallest cache is more than there is.
  EXPECT_EQ(blocks_in(-5000), std::pair(8L, 4L));
}

TEST(RolloutMemoryTest, TheNoteOfACacheTellsItsRoom) {
  const ModelConfig config = TinyConfig();
  RolloutMemoryOptions options = TwoLanes();
  options.free.host = MemoryFor(config, options, 20);
  const MemoryPlan plan = RolloutMemory(config, &config, options).value();
  EXPECT_EQ(plan.items[1].note,
            "room for 1 of max_num_seqs=5 sequences of 200 tokens (senior.max_model_len)");
  EXPECT_EQ(plan.items[3].note,
            "room for 4 of max_num_seqs=5 sequences of 100 tokens (junior.max_model_len)");
}

TEST(RolloutMemoryTest, ASizeThatIsGivenDoesNotDependOnTheMachine) {
  const ModelConfig config = TinyConfig();
  RolloutMemoryOptions options = TwoLanes();
  options.free.host = 1;
  options.kv_cache_bytes = int64_t{1} << 60;
  EXPECT_EQ(PlanCacheBlocks(config, &config, options)->senior.total(), 24);
  // The memory of the host says nothing about a GPU's.
  options.kv_cache_bytes = 0;
  options.on_host = false;
  EXPECT_EQ(PlanCacheBlocks(config, &config, options)->senior.total(), 24);
}

TEST(RolloutMemoryTest, TheCacheTakesWhatTheMemoryOfAGpuLeaves) {
  const ModelConfig config = TinyConfig();
  RolloutMemoryOptions options = TwoLanes();
  options.on_host = false;
  const MemoryPlan most = RolloutMemory(config, &config, options).value();
  auto items = Items(most);
  EXPECT_LT(most.host_bytes(), items["staged_weight_update"] + 1) << "all else is on the GPU";
  const int64_t caches = items["senior_kv_cache"] + items["junior_kv_cache"];
  for (const int64_t blocks : {36, 20, 12, -5000}) {
    options.free = {.host = 1, .devices = {MemoryLeaving(most.device_bytes(0) - caches, blocks)}};
    const CacheBlocks planned = PlanCacheBlocks(config, &config, options).value();
    EXPECT_EQ(planned.senior.total() + planned.junior.total(), std::max<int64_t>(blocks, 12));
    const MemoryPlan plan = RolloutMemory(config, &config, options).value();
    const absl::Status fits = CheckFits(plan, {.devices = options.free.devices});
    EXPECT_EQ(fits.ok(), blocks >= 12) << fits;
  }
}

// Sequences of 200 tokens have two splits of keys.
TEST(RolloutMemoryTest, AttentionOfAGpuHasPartialResults) {
  const ModelConfig config = TinyConfig();
  const auto more_rows = [&](bool on_host, int64_t rows) {
    RolloutMemoryOptions options = TwoLanes();
    options.on_host = on_host;
    options.max_batched_tokens = 100;
    const int64_t before = Items(RolloutMemory(config, &config, options).value())["activations"];
    options.max_batched_tokens += rows;
    return Items(RolloutMemory(config, &config, options).value())["activations"] - before;
  };
  const int64_t numbers = kernels::PartialNumbers(config.num_attention_heads,
                                                  config.num_key_value_heads, config.head_dim);
  EXPECT_EQ(more_rows(false, 7) - more_rows(true, 7), 7 * 2 * numbers * 4);
  // There is an end to it.
  const int64_t all = kernels::kPartialNumbers;
  EXPECT_LT(more_rows(false, all) - more_rows(true, all), all * 4);
}

TEST(RolloutMemoryTest, AJuniorWithAGpuOfItsOwnHasThatMemory) {
  const ModelConfig config = TinyConfig();
  RolloutMemoryOptions options = TwoLanes();
  options.on_host = false;
  options.junior_has_own_device = true;
  const MemoryPlan most = RolloutMemory(config, &config, options).value();
  auto items = Items(most);
  EXPECT_EQ(items["junior_logits"], items["logits"]);
  EXPECT_EQ(most.device_bytes(0) + most.device_bytes(1) + most.host_bytes(), most.total_bytes());
  options.free.devices = {MemoryLeaving(most.device_bytes(0) - items["senior_kv_cache"], 9),
                          MemoryLeaving(most.device_bytes(1) - items["junior_kv_cache"], 7)};
  const CacheBlocks planned = PlanCacheBlocks(config, &config, options).value();
  EXPECT_EQ(planned.senior.total(), 9);
  EXPECT_EQ(planned.junior.total(), 7);
  const MemoryPlan plan = RolloutMemory(config, &config, options).value();
  EXPECT_TRUE(CheckFits(plan, options.free).ok());
  options.free.devices[1] = 1;
  EXPECT_EQ(PlanCacheBlocks(config, &config, options)->senior.total(), 9) << "another memory";
  EXPECT_FALSE(CheckFits(RolloutMemory(config, &config, options).value(), options.free).ok());
}

// Returns the bytes that only a lane takes on its GPU without a cache.
int64_t LaneBytes(const ModelConfig& config, RolloutMemoryOptions options, bool is_senior) {
  options.junior_has_own_device = true;
  const MemoryPlan plan = RolloutMemory(config, &config, options).value();
  return plan.device_bytes(is_senior ? 0 : 1) -
         Items(plan)[is_senior ? "senior_kv_cache" : "junior_kv_cache"];
}

TEST(RolloutMemoryTest, ALaneStaysWithinItsShareOfAGpu) {
  const ModelConfig config = TinyConfig();
  RolloutMemoryOptions options = TwoLanes();
  options.on_host = false;
  const int64_t senior = LaneBytes(config, options, true), block = CacheBytes(1);
  const int64_t junior = LaneBytes(config, options, false);
  EXPECT_GT(senior, junior) << "updates are the senior's";
  // A GPU of which the lanes have a half and a quarter, with room for 9 and some 7 blocks.
  const int64_t size = 2 * (senior + 9 * block);
  options.free = {.devices = {size}, .device_sizes = {size}};
  options.senior.gpu_memory_utilization = 0.5;
  options.junior.gpu_memory_utilization = static_cast<double>(junior + 7 * block + 1) / size;
  const CacheBlocks planned = PlanCacheBlocks(config, &config, options).value();
  EXPECT_EQ(planned.senior.total(), 9);
  EXPECT_EQ(planned.junior.total(), 7);
  const MemoryPlan plan = RolloutMemory(config, &config, options).value();
  EXPECT_LE(plan.device_bytes(0), senior + junior + 16 * block);
  EXPECT_EQ(plan.items[1].note,
            "room for 1 of max_num_seqs=5 sequences of 200 tokens (senior.max_model_len); the lane "
            "takes at most " +
                Gigabytes(size / 2) + " (senior.gpu_memory_utilization)");
  // The share is one of the whole memory, whatever is free.
  options.free.devices = {1};
  EXPECT_EQ(PlanCacheBlocks(config, &config, options)->senior.total(), 9);
  EXPECT_FALSE(CheckFits(RolloutMemory(config, &config, options).value(), options.free).ok());
  // No more than can be used.
  options.free.device_sizes = {1000 * size};
  EXPECT_EQ(PlanCacheBlocks(config, &config, options)->senior.total(), 24);
  EXPECT_EQ(PlanCacheBlocks(config, &config, options)->junior.total(), 12);
  // On a GPU of its own the junior has a share of that one.
  options.junior_has_own_device = true;
  options.free.device_sizes = {size, size};
  EXPECT_EQ(PlanCacheBlocks(config, &config, options)->junior.total(), 7);
  options.free.device_sizes[1] = 2 * size;
  EXPECT_EQ(PlanCacheBlocks(config, &config, options)->junior.total(), 12);
}

TEST(RolloutMemoryTest, ALaneWithoutAShareHasWhatIsFreeBesideTheOther) {
  const ModelConfig config = TinyConfig();
  RolloutMemoryOptions options = TwoLanes();
  options.on_host = false;
  const int64_t senior = LaneBytes(config, options, true), block = CacheBytes(1);
  const MemoryPlan most = RolloutMemory(config, &config, options).value();
  auto items = Items(most);
  const int64_t others = most.device_bytes(0) - items["senior_kv_cache"] - items["junior_kv_cache"];
  const int64_t size = MemoryLeaving(others, 9 + 6);
  options.free = {.devices = {size}, .device_sizes = {size}};
  options.senior.gpu_memory_utilization = static_cast<double>(senior + 9 * block + 1) / size;
  const CacheBlocks planned = PlanCacheBlocks(config, &config, options).value();
  EXPECT_EQ(planned.senior.total(), 9);
  EXPECT_EQ(planned.junior.total(), 6);
}

TEST(RolloutMemoryTest, PaddedRowsAreCounted) {
  const ModelConfig config = TinyConfig("llama", {{"vocab_size", 100'000}});
  RolloutMemoryOptions options = TwoLanes();
  options.on_host = false;
  const auto items = [&](int64_t product_rows, int64_t batched_tokens) {
    options.product_rows = product_rows;
    options.max_batched_tokens = batched_tokens;
    return Items(RolloutMemory(config, nullptr, options).value());
  };
  options.senior = Lane(100);  // without partial results of attention
  auto without = items(0, 600), padded = items(400, 600);
  EXPECT_EQ(padded["activations"], items(0, 800)["activations"]);
  EXPECT_EQ(padded["logits"] - without["logits"],
            without["logits"] / kLogitsBytes * 400 * 100'000 * 4);
}

TEST(RolloutMemoryTest, AShareThatIsTooSmallIsNamed) {
  const ModelConfig config = TinyConfig();
  RolloutMemoryOptions options = TwoLanes();
  options.on_host = false;
  const int64_t junior = LaneBytes(config, options, false), block = CacheBytes(1);
  const auto check = [&](int64_t bytes) {
    options.free.device_sizes = {bytes};
    options.junior.gpu_memory_utilization = 1;
    return PlanCacheBlocks(config, &config, options).status();
  };
  EXPECT_TRUE(check(junior + 4 * block).ok());
  const absl::Status status = check(junior + 4 * block - 1);
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  EXPECT_EQ(FieldPath(status), "junior.gpu_memory_utilization") << status;
}

TEST(RolloutMemoryTest, ARankCountsWhatItHolds) {
  const ModelConfig config = TinyConfig("llama", {{"intermediate_size", 48}});
  RolloutMemoryOptions options = TwoLanes();
  options.layout.tensor_parallel_size = 2;
  // Rank 0 holds half of the senior's heads and the whole junior, rank 1 the former alone.
  options.free.host = MemoryFor(config, options, 13);
  const CacheBlocks first = PlanCacheBlocks(config, &config, options).value();
  EXPECT_EQ(first.senior.total() / 2 + first.junior.total(), 13);
  EXPECT_EQ(first.junior.total(), 8) << "as many for either lane, of which one is halved";
  options.rank = 1;
  EXPECT_EQ(PlanCacheBlocks(config, &config, options)->senior.total(), 24)
      << "rank 1 has neither a junior nor whole updates";
  EXPECT_EQ(PlanCacheBlocks(config, &config, options)->junior.total(), 12) << "no limit of its own";
}

TEST(RolloutMemoryTest, ASpeculatorIsHeldByTheFirstRank) {
  const ModelConfig config = TinyConfig();
  RolloutMemoryOptions options = TwoLanes();
  const MemoryPlan without = RolloutMemory(config, &config, options).value();
  options.speculator = {.bytes = 1'000'000, .largest_bytes = 400'000};
  const MemoryPlan with = RolloutMemory(config, &config, options).value();
  EXPECT_EQ(Items(with)["speculator_weights"], 1'000'000);
  // An update makes a second copy of it, too, and stages its tensors.
  EXPECT_EQ(Items(with)["weight_update_copy"], Items(without)["weight_update_copy"] + 1'000'000);
  EXPECT_LT(Items(without)["staged_weight_update"], 800'000);
  EXPECT_EQ(Items(with)["staged_weight_update"], 800'000);
  options.layout.tensor_parallel_size = 2;
  options.rank = 1;
  EXPECT_FALSE(
      Items(RolloutMemory(config, &config, options).value()).contains("speculator_weights"));
}

// The sizes are multiples of 32: no panel and no group is padded.
nlohmann::json Even() {
  return {{"vocab_size", 64}, {"hidden_size", 32},        {"intermediate_size", 64},
          {"head_dim", 8},    {"num_attention_heads", 4}, {"num_key_value_heads", 2}};
}

TEST(RolloutMemoryTest, PackedMapsTakeTheBytesOfTheirFormat) {
  const ModelConfig config = TinyConfig("llama", Even());
  const auto model = TinyModel("llama", Even());
  int64_t matrices = 0, others = 0;
  for (const auto& [name, tensor] : model->Parameters()) {
    (tensor.dim() == 2 ? matrices : others) += tensor.numel();
  }
  const std::pair<WeightFormat, double> formats[] = {{WeightFormat::kFloat32, 4},
                                                     {WeightFormat::kBfloat16, 2},
                                                     {WeightFormat::kInt8, 1 + 2.0 / 32},
                                                     {WeightFormat::kInt4, 0.5 + 2.0 / 32}};
  for (const auto& [format, bytes] : formats) {
    const RolloutMemoryOptions options = {
        .senior = Lane(100, DType::kFloat32, format), .max_num_seqs = 5, .max_batched_tokens = 64};
    auto items = Items(RolloutMemory(config, nullptr, options).value());
    EXPECT_EQ(items["senior_weights"],
              4 * others + static_cast<int64_t>(static_cast<double>(matrices) * bytes));
    const KvCache cache(model->CacheLayout(), 5 * 2 + 2);
    EXPECT_EQ(items["senior_kv_cache"], 2 * 2 * static_cast<int64_t>(cache.keys(0).nbytes()));
  }
}

TEST(RolloutMemoryTest, RanksHoldTheirShardsOfPackedMaps) {
  const ModelConfig config = TinyConfig("llama", Even());
  RolloutMemoryOptions options = {.senior = Lane(100, DType::kFloat32, WeightFormat::kInt8),
                                  .max_num_seqs = 5,
                                  .max_batched_tokens = 64};
  const int64_t whole = Items(RolloutMemory(config, nullptr, options).value())["senior_weights"];
  options.layout.tensor_parallel_size = 2;
  const int64_t first = Items(RolloutMemory(config, nullptr, options).value())["senior_weights"];
  options.rank = 1;
  const int64_t second = Items(RolloutMemory(config, nullptr, options).value())["senior_weights"];
  EXPECT_EQ(first, second);
  EXPECT_LT(first, whole);
  EXPECT_GE(2 * first, whole);
}

TEST(RolloutMemoryTest, RanksHoldTheirShardsOfTheLanes) {
  const nlohmann::json even = {{"intermediate_size", 48}};  // the vocabulary need not be
  const ModelConfig senior = TinyConfig("llama", even), junior = TinyConfig("qwen3", even);
  RolloutMemoryOptions options = {
      .senior = Lane(100), .junior = Lane(100), .max_num_seqs = 5, .max_batched_tokens = 64};
  auto whole = Items(RolloutMemory(senior, &junior, options).value());
  options.layout.tensor_parallel_size = 2;
  auto first = Items(RolloutMemory(senior, &junior, options).value());
  EXPECT_EQ(first["senior_kv_cache"], whole["senior_kv_cache"] / 2);
  EXPECT_EQ(first["junior_kv_cache"], whole["junior_kv_cache"]);
  EXPECT_EQ(first["junior_weights"], whole["junior_weights"]);
  EXPECT_EQ(first["weight_update_copy"], first["senior_weights"]);
  // Rank 0 keeps all tensors for the others.
  EXPECT_EQ(first["staged_weight_update"], 4 * TinyModel("llama", even)->num_parameters());
  options.rank = 1;
  auto second = Items(RolloutMemory(senior, &junior, options).value());
  const auto shard = TinyModel("llama", even, {.placement = {.shard_index = 1, .shard_count = 2}});
  int64_t bytes = 0;
  for (const auto& [name, tensor] : shard->Parameters()) {
    bytes += static_cast<int64_t>(tensor.nbytes());
  }
  EXPECT_EQ(second["senior_weights"], bytes);
  EXPECT_EQ(first["senior_weights"] - second["senior_weights"], 2 * 4 * senior.hidden_size)
      << "rank 0 has a row more, in the embedding and in the head";
  EXPECT_FALSE(second.contains("junior_weights"));
  EXPECT_EQ(second["staged_weight_update"], 4 * 61 * senior.hidden_size) << "a tensor at a time";
  EXPECT_EQ(second["weight_update_copy"], second["senior_weights"]);
}

TEST(RolloutMemoryTest, RanksHoldTheirExperts) {
  const nlohmann::json changes = {
      {"intermediate_size", 40}, {"num_experts", 6}, {"moe_intermediate_size", 13}};
  const ModelConfig config = TinyConfig("qwen3_moe", changes);
  for (const auto& [format, dtype] : {std::pair{WeightFormat::kDense, DType::kFloat32},
                                      {WeightFormat::kBfloat16, DType::kFloat32}}) {
    RolloutMemoryOptions options = {
        .senior = Lane(100, dtype, format), .max_num_seqs = 5, .max_batched_tokens = 64};
    options.layout = {.tensor_parallel_size = 2, .enable_expert_parallel = true};
    for (const int64_t rank : {0, 1}) {
      options.rank = rank;
      const auto shard =
          TinyModel("qwen3_moe", changes,
                    {.placement = {.weight_format = format,
                                   .shard_index = rank,
                                   .shard_count = 2,
                                   .experts = {.index = rank, .count = 2, .whole = true}}});
      int64_t bytes = 0;
      for (const Parameter& parameter : shard->DeclaredParameters()) {
        if (parameter.value.defined()) bytes += static_cast<int64_t>(parameter.value.nbytes());
        if (parameter.packed != nullptr) {
          const std::vector<int64_t> shape = parameter.shard.ShapeOf(parameter.spec.shape);
          bytes += kernels::PackedBytes(format, shape[0], shape[1]);
        }
      }
      auto items = Items(RolloutMemory(config, nullptr, options).value());
      EXPECT_EQ(items["senior_weights"], bytes);
      EXPECT_EQ(items["weight_update_copy"], bytes);
    }
  }
}

TEST(RolloutMemoryTest, AnUpdateTakesTwoTensorsAndASecondCopyOfTheWeights) {
  const ModelConfig config = TinyConfig("llama", Even());
  const RolloutMemoryOptions options = {.senior = Lane(8, DType::kFloat32, WeightFormat::kInt4),
                                        .max_num_seqs = 2,
                                        .max_batched_tokens = 8};
  auto items = Items(RolloutMemory(config, nullptr, options).value());
  EXPECT_EQ(items["weight_update_copy"], items["senior_weights"]);
  EXPECT_EQ(items["staged_weight_update"], 2 * 4 * 64 * 32) << "two of the largest, in float32";
}

TEST(RolloutMemoryTest, AdaptersAreASmallUpdateAndShareTheBaseModel) {
  const ModelConfig config = TinyConfig("llama", Even());
  RolloutMemoryOptions options = {
      .senior = Lane(8), .junior = Lane(8), .max_num_seqs = 2, .max_batched_tokens = 8};
  const auto whole = Items(RolloutMemory(config, &config, options).value());
  options.senior.lora = {.rank = 2, .alpha = 4, .target_modules = {"q_proj"}};
  options.shares_base_model = true;
  auto items = Items(RolloutMemory(config, &config, options).value());
  const int64_t adapters = items["weight_update_copy"];
  EXPECT_EQ(adapters, items["senior_weights"] - whole.at("senior_weights"));
  EXPECT_GT(adapters, 0);
  EXPECT_EQ(items["junior_weights"], 0);
  options.senior.lora.target_modules = {"nothing"};
  EXPECT_EQ(FieldPath(RolloutMemory(config, &config, options).status()),
            "senior.lora.target_modules[0]");
}

TEST(RolloutMemoryTest, ATensorFromAnotherGpuIsWholeOnThisOne) {
  const ModelConfig senior = TinyConfig("llama", Even());
  RolloutMemoryOptions options = {
      .senior = Lane(8), .max_num_seqs = 2, .max_batched_tokens = 8, .on_host = false};
  const auto bytes = [&] {
    return Items(RolloutMemory(senior, nullptr, options).value())["weight_update_from_gpu"];
  };
  constexpr int64_t kValues = 64 * 32;  // of the largest tensor
  EXPECT_EQ(bytes(), kValues * (4 + kDeviceBytesOfWord));
  options.senior = Lane(8, DType::kBFloat16);
  EXPECT_EQ(bytes(), kValues / 2 * (4 + kDeviceBytesOfWord));
  options.layout.tensor_parallel_size = 2;
  for (options.rank = 0; options.rank < 2; ++options.rank) {
    EXPECT_EQ(bytes(), kValues / 2 * (4 + kDeviceBytesOfWord)) << "every rank reads whole tensors";
  }
  EXPECT_EQ(bytes(), 0) << "a rank of the junior alone";
  options.rank = 0;
  options.on_host = true;
  EXPECT_EQ(bytes(), 0);
}

TEST(RolloutMemoryTest, NewWeightsAreStagedOnTheHost) {
  const ModelConfig senior = TinyConfig();
  const MemoryPlan plan =
      RolloutMemory(
          senior, nullptr,
          {.senior = Lane(8), .max_num_seqs = 2, .max_batched_tokens = 8, .on_host = false})
          .value();
  EXPECT_EQ(plan.host_bytes(), Items(plan)["staged_weight_update"]);
}

}  // namespace
}  // namespace tandem::rollout
