#include "services/rollout/engine/ranks/rank_layout.h"

#include <gtest/gtest.h>

#include <string>

#include "common/base/errors/error.h"
#include "common/model/testing/models.h"

namespace tandem::rollout {
namespace {

ModelConfig Config(int64_t heads, int64_t key_value_heads) {
  ModelConfig config;
  config.model_type = "llama";
  config.num_attention_heads = heads;
  config.num_key_value_heads = key_value_heads;
  config.intermediate_size = 48;
  config.vocab_size = 64;
  return config;
}

const ModelConfig kSenior = Config(8, 4);
const ModelConfig kJunior = Config(6, 2);

TEST(RankLayoutTest, TheServerHasTheRanksOfItsLargerModel) {
  EXPECT_TRUE(CheckRankLayout({}, kSenior, nullptr, 1).ok());
  EXPECT_TRUE(CheckRankLayout({.tensor_parallel_size = 4}, kSenior, nullptr, 4).ok());
  const RankLayout both = {.tensor_parallel_size = 4, .junior_tensor_parallel_size = 2};
  EXPECT_TRUE(CheckRankLayout(both, kSenior, &kJunior, 4).ok());
  EXPECT_TRUE(CheckRankLayout({.junior_tensor_parallel_size = 2}, kSenior, &kJunior, 2).ok());
  // Without a junior its ranks do not count.
  EXPECT_TRUE(CheckRankLayout({.junior_tensor_parallel_size = 2}, kSenior, nullptr, 1).ok());
}

TEST(RankLayoutTest, WhatCannotBeIsRefusedWithTheNumbers) {
  const auto expect = [](const RankLayout& layout, int64_t world_size, const std::string& message) {
    const absl::Status status = CheckRankLayout(layout, kSenior, &kJunior, world_size);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(status.message(), message);
  };
  expect({.tensor_parallel_size = 2}, 3,
         "senior.tensor_parallel_size: the senior is on the first 2 ranks and the junior on the "
         "first 1, "
         "so the server needs 2 ranks, but it has 3");
  expect({.junior_tensor_parallel_size = 2}, 1,
         "junior.tensor_parallel_size: the senior is on the first 1 ranks and the junior on the "
         "first 2, so the server needs 2 ranks, but it has 1");
  expect({.tensor_parallel_size = 0}, 1, "senior.tensor_parallel_size: must be at least 1, got 0");
  expect(
      {.tensor_parallel_size = 8}, 8,
      "senior.tensor_parallel_size: 8 does not divide config.json.num_key_value_heads, which is 4");
  expect({.tensor_parallel_size = 4, .junior_tensor_parallel_size = 4}, 4,
         "junior.tensor_parallel_size: 4 does not divide config.json.num_attention_heads, which "
         "is 6");
  expect({.tensor_parallel_size = 2, .junior_gpu_devices = {0, 1}}, 2,
         "junior.gpu_devices: names 2 devices, but the junior has 1 ranks");
  expect({.tensor_parallel_size = 2, .enable_expert_parallel = true}, 2,
         "senior.enable_expert_parallel: 2 ranks cannot divide the experts of a llama model, which "
         "has "
         "none");
}

TEST(RankLayoutTest, ExpertsDivideWhereTheirWidthDoesNot) {
  const ModelConfig model = TinyConfig(
      "qwen3_moe", {{"intermediate_size", 40}, {"num_experts", 6}, {"moe_intermediate_size", 13}});
  const RankLayout shards = {.tensor_parallel_size = 2},
                   whole = {.tensor_parallel_size = 2, .enable_expert_parallel = true};
  EXPECT_EQ(
      CheckRankLayout(shards, model, nullptr, 2).message(),
      "senior.tensor_parallel_size: 2 does not divide config.json.moe_intermediate_size, which is "
      "13");
  EXPECT_TRUE(CheckRankLayout(whole, model, nullptr, 2).ok());
  EXPECT_EQ(CheckRankLayout(whole, TinyConfig("qwen3_moe", {{"intermediate_size", 40}}), nullptr, 2)
                .message(),
            "senior.enable_expert_parallel: 2 does not divide config.json.num_experts, which is 5");
  EXPECT_EQ(CheckRankLayout({.enable_expert_parallel = true}, model, nullptr, 1).message(),
            "senior.enable_expert_parallel: needs senior.tensor_parallel_size above 1");
  // The junior has its own setting.
  EXPECT_EQ(
      CheckRankLayout({.junior_tensor_parallel_size = 2, .junior_enable_expert_parallel = true},
                      kSenior, &kJunior, 2)
          .message(),
      "junior.enable_expert_parallel: 2 ranks cannot divide the experts of a llama model, "
      "which has none");
}

}  // namespace
}  // namespace tandem::rollout
