#include "services/rollout/engine/rollout_memory.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <map>
#include <string>

#include "common/model/testing/models.h"

namespace tandem::rollout {
namespace {

std::map<std::string, int64_t> Items(const MemoryPlan& plan) {
  std::map<std::string, int64_t> items;
  for (const MemoryPlan::Item& item : plan.items) items[item.name] = item.bytes;
  return items;
}

TEST(RolloutMemoryTest, CachesOfBothLanesAreCountedUpToTheShorterLimit) {
  const ModelConfig senior = TinyConfig();
  const ModelConfig junior = TinyConfig("qwen3", {{"max_position_embeddings", 100}});
  const RolloutMemoryOptions options = {
      .max_num_seqs = 5, .max_model_len = 200, .max_batched_tokens = 64};
  auto items = Items(RolloutMemory(senior, &junior, options).value());
  // Five sequences of 100 tokens, two blocks each, and one more that is scored.
  const KvCache cache(TinyModel()->CacheLayout(), 5 * 2 + 2);
  const int64_t cache_bytes = 2 * 2 * static_cast<int64_t>(cache.keys(0).nbytes());
  EXPECT_EQ(items["senior_kv_cache"], cache_bytes);
  EXPECT_EQ(items["junior_kv_cache"], cache_bytes);
  EXPECT_EQ(items["senior_weights"], 4 * TinyModel()->num_parameters());
  RolloutMemoryOptions half = options;
  half.dtype = DType::kBFloat16;
  auto halved = Items(RolloutMemory(senior, nullptr, half).value());
  // Half the bytes, and four blocks instead of two.
  EXPECT_EQ(halved["senior_kv_cache"], cache_bytes);
  EXPECT_EQ(halved["senior_weights"], items["senior_weights"] / 2);
  EXPECT_EQ(halved["staged_weight_update"], items["staged_weight_update"]);
  EXPECT_FALSE(halved.contains("junior_weights"));
}

TEST(RolloutMemoryTest, RanksHoldTheirShardsOfTheLanes) {
  const nlohmann::json even = {{"intermediate_size", 48}};  // the vocabulary need not be
  const ModelConfig senior = TinyConfig("llama", even), junior = TinyConfig("qwen3", even);
  RolloutMemoryOptions options = {
      .max_num_seqs = 5, .max_model_len = 100, .max_batched_tokens = 64};
  auto whole = Items(RolloutMemory(senior, &junior, options).value());
  options.layout.tensor_parallel_size = 2;
  auto first = Items(RolloutMemory(senior, &junior, options).value());
  EXPECT_EQ(first["senior_kv_cache"], whole["senior_kv_cache"] / 2);
  EXPECT_EQ(first["junior_kv_cache"], whole["junior_kv_cache"]);
  EXPECT_EQ(first["junior_weights"], whole["junior_weights"]);
  EXPECT_EQ(first["staged_weight_update"], whole["staged_weight_update"]);
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
}

TEST(RolloutMemoryTest, NewWeightsAreStagedOnTheHost) {
  const ModelConfig senior = TinyConfig();
  const MemoryPlan plan =
      RolloutMemory(
          senior, nullptr,
          {.max_num_seqs = 2, .max_model_len = 8, .max_batched_tokens = 8, .on_host = false})
          .value();
  EXPECT_EQ(plan.host_bytes(), Items(plan)["staged_weight_update"]);
}

}  // namespace
}  // namespace tandem::rollout
