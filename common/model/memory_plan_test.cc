#include "common/model/memory_plan.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>

#include "common/base/error.h"
#include "common/model/testing/models.h"

namespace tandem {
namespace {

std::map<std::string, int64_t> Items(const MemoryPlan& plan) {
  std::map<std::string, int64_t> items;
  int64_t total = 0;
  for (const MemoryPlan::Item& item : plan.items) {
    items[item.name] = item.bytes;
    total += item.bytes;
  }
  EXPECT_EQ(plan.total_bytes(), total);
  return items;
}

TEST(MemoryPlanTest, WeightsAreThoseOfTheModelForEveryFamily) {
  for (const char* family : {"llama", "qwen2", "qwen3"}) {
    for (const bool tied : {false, true}) {
      const nlohmann::json changes = {
          {"tie_word_embeddings", tied}, {"attention_bias", true}, {"mlp_bias", true}};
      const ModelConfig config = TinyConfig(family, changes);
      const auto model = TinyModel(family, changes, {.requires_grad = true});
      auto items = Items(TrainingMemoryPlan(config, {.freeze = {"*norm*"}}).value());
      int64_t bytes = 0, trained = 0;
      for (const auto& [name, tensor] : model->Parameters()) {
        bytes += static_cast<int64_t>(tensor.nbytes());
        if (name.find("norm") == std::string::npos) {
          trained += static_cast<int64_t>(tensor.nbytes());
        }
      }
      EXPECT_EQ(items["weights"], bytes) << family;
      EXPECT_EQ(items["gradients"], trained);
      EXPECT_EQ(items["optimizer"], 2 * trained);
    }
  }
}

TEST(MemoryPlanTest, CriticsHaveAValueHeadAndNoLogits) {
  const auto model = TinyModel("llama", {}, {.head = HeadKind::kValue});
  auto items = Items(TrainingMemoryPlan(model->config(), {.head = HeadKind::kValue}).value());
  EXPECT_EQ(items["weights"], 4 * model->num_parameters());
  EXPECT_FALSE(items.contains("logits"));
}

TEST(MemoryPlanTest, CachesOfBothLanesAreCountedUpToTheShorterLimit) {
  const ModelConfig senior = TinyConfig();
  const ModelConfig junior = TinyConfig("qwen3", {{"max_position_embeddings", 100}});
  const RolloutMemoryOptions options = {
      .num_slots = 5, .max_model_len = 200, .max_batched_tokens = 64};
  auto items = Items(RolloutMemoryPlan(senior, &junior, options).value());
  const KvCache cache(senior, 5, 100);
  const int64_t cache_bytes = 2 * 2 * static_cast<int64_t>(cache.keys(0).nbytes());
  EXPECT_EQ(items["senior_kv_cache"], cache_bytes);
  EXPECT_EQ(items["junior_kv_cache"], cache_bytes);
  EXPECT_EQ(items["senior_weights"], 4 * TinyModel()->num_parameters());
  RolloutMemoryOptions half = options;
  half.dtype = DType::kBFloat16;
  auto halved = Items(RolloutMemoryPlan(senior, nullptr, half).value());
  EXPECT_EQ(halved["senior_kv_cache"], cache_bytes);  // half the bytes, twice the length
  EXPECT_EQ(halved["senior_weights"], items["senior_weights"] / 2);
  EXPECT_EQ(halved["staged_weight_update"], items["staged_weight_update"]);
  EXPECT_FALSE(halved.contains("junior_weights"));
}

TEST(MemoryPlanTest, RanksOfARolloutHoldTheirPartsOfTheLanes) {
  const nlohmann::json even = {{"vocab_size", 64}, {"intermediate_size", 48}};
  const ModelConfig senior = TinyConfig("llama", even), junior = TinyConfig("qwen3", even);
  RolloutMemoryOptions options = {.num_slots = 5, .max_model_len = 100, .max_batched_tokens = 64};
  auto whole = Items(RolloutMemoryPlan(senior, &junior, options).value());
  options.senior_ranks = 2;
  auto first = Items(RolloutMemoryPlan(senior, &junior, options).value());
  EXPECT_EQ(first["senior_kv_cache"], whole["senior_kv_cache"] / 2);
  EXPECT_EQ(first["junior_kv_cache"], whole["junior_kv_cache"]);
  EXPECT_EQ(first["junior_weights"], whole["junior_weights"]);
  EXPECT_EQ(first["staged_weight_update"], whole["staged_weight_update"]);
  options.rank = 1;
  auto second = Items(RolloutMemoryPlan(senior, &junior, options).value());
  const auto shard = TinyModel("llama", even, {.placement = {.shard_index = 1, .shard_count = 2}});
  int64_t bytes = 0;
  for (const auto& [name, tensor] : shard->Parameters()) {
    bytes += static_cast<int64_t>(tensor.nbytes());
  }
  EXPECT_EQ(second["senior_weights"], bytes);
  EXPECT_EQ(second["senior_weights"], first["senior_weights"]);
  EXPECT_FALSE(second.contains("junior_weights"));
  EXPECT_EQ(second["staged_weight_update"], 4 * 64 * senior.hidden_size) << "a tensor at a time";
}

TEST(MemoryPlanTest, ALongSequenceDecidesOverTheMicroBatch) {
  const ModelConfig config = TinyConfig();
  const auto activations = [&](int64_t micro_batch_tokens, int64_t max_model_len) {
    return Items(TrainingMemoryPlan(config, {.micro_batch_tokens = micro_batch_tokens,
                                             .max_model_len = max_model_len})
                     .value())["activations"];
  };
  EXPECT_EQ(activations(10, 100), activations(100, 10));
  EXPECT_LT(activations(10, 20), activations(10, 100));
}

TEST(MemoryPlanTest, RanksShareOutWhatTheyAreToldTo) {
  const ModelConfig config = TinyConfig();
  auto whole = Items(TrainingMemoryPlan(config, {.micro_batch_tokens = 100}).value());
  auto shared = Items(TrainingMemoryPlan(config, {.micro_batch_tokens = 100,
                                                  .shares = {.weights = 4,
                                                             .gradients = 2,
                                                             .optimizer = 8,
                                                             .activations = 2,
                                                             .gathered_blocks = 1}})
                          .value());
  EXPECT_EQ(shared["weights"], whole["weights"] / 4);
  EXPECT_EQ(shared["gradients"], whole["gradients"] / 2);
  EXPECT_EQ(shared["optimizer"], whole["optimizer"] / 8);
  EXPECT_EQ(shared["activations"], whole["activations"] / 2);
  const auto model = TinyModel("llama", {}, {.requires_grad = true});
  int64_t largest = 0;
  for (const at::Tensor& block : model->BlockBuffers()) {
    largest = std::max(largest, static_cast<int64_t>(block.nbytes()));
  }
  EXPECT_NEAR(static_cast<double>(shared["gathered_weights"]), static_cast<double>(largest), 1024);
  EXPECT_FALSE(whole.contains("gathered_weights"));
}

TEST(MemoryPlanTest, BadFreezePatternsAndFamiliesAreRefused) {
  EXPECT_EQ(FieldPath(TrainingMemoryPlan(TinyConfig(), {.freeze = {"x"}}).status()), "freeze[0]");
  ModelConfig config = TinyConfig();
  config.model_type = "gpt2";
  EXPECT_EQ(TrainingMemoryPlan(config, {}).status().code(), absl::StatusCode::kUnimplemented);
}

TEST(MemoryPlanTest, WhatDoesNotFitIsRefusedWithTheNumbers) {
  const MemoryPlan plan = {{{"weights", 3'000'000'000}, {"logits", 500'000'000}}};
  EXPECT_TRUE(CheckFits(plan, 3'500'000'000).ok());
  const absl::Status status = CheckFits(plan, 3'499'999'999);
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(status.message()),
              testing::AllOf(testing::HasSubstr("3.50 GB (weights 3.00 GB, logits 0.50 GB)"),
                             testing::HasSubstr("3.50 GB are available")));
}

}  // namespace
}  // namespace tandem
