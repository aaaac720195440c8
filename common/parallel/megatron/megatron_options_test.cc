#include "common/parallel/megatron/megatron_options.h"

#include <gtest/gtest.h>

#include "common/base/errors/error.h"
#include "common/model/testing/models.h"

namespace tandem::parallel {
namespace {

ModelConfig Config() {
  return TinyConfig("llama", {{"num_hidden_layers", 6},
                              {"num_attention_heads", 8},
                              {"num_key_value_heads", 4},
                              {"intermediate_size", 48},
                              {"vocab_size", 60}});
}

void ExpectRefused(const MegatronOptions& options, int64_t world, const char* path,
                   const char* message, absl::StatusCode code = absl::StatusCode::kInvalidArgument,
                   HeadKind head = HeadKind::kLm, const ModelConfig& config = Config()) {
  const absl::Status status = CheckMegatronOptions(options, config, head, world);
  EXPECT_EQ(status.code(), code) << status;
  EXPECT_EQ(FieldPath(status), path);
  EXPECT_NE(std::string(status.message()).find(message), std::string::npos) << status;
}

TEST(MegatronOptionsTest, WhatFitsIsTaken) {
  for (const MegatronOptions& options :
       {MegatronOptions{}, MegatronOptions{.tensor_model_parallel_size = 4},
        MegatronOptions{.pipeline_model_parallel_size = 2,
        .virtual_pipeline_model_parallel_size = 3},
        MegatronOptions{.tensor_model_parallel_size = 2,
        .pipeline_model_parallel_size = 2,
        .context_parallel_size = 2}}) {
    for (const int64_t replicas : {1, 3}) {
      const absl::Status status = CheckMegatronOptions(options, Config(), HeadKind::kLm,
                                                       replicas * options.model_parallel_size());
      EXPECT_TRUE(status.ok()) << status;
    }
  }
}

TEST(MegatronOptionsTest, SizesAreAtLeastOne) {
  ExpectRefused({.tensor_model_parallel_size = 0}, 1, "strategy.tensor_model_parallel_size",
                "got 0");
  ExpectRefused({.pipeline_model_parallel_size = -1}, 1, "strategy.pipeline_model_parallel_size",
                "got -1");
  ExpectRefused({.context_parallel_size = 0}, 1, "strategy.context_parallel_size", "got 0");
  ExpectRefused({.virtual_pipeline_model_parallel_size = 0}, 1,
                "strategy.virtual_pipeline_model_parallel_size", "got 0");
}

TEST(MegatronOptionsTest, ExpertsDivide) {
  const char* const field = "strategy.expert_model_parallel_size";
  const auto expect = [&](const MegatronOptions& options, int64_t world, const char* message,
                          const ModelConfig& config) {
    ExpectRefused(options, world, field, message, absl::StatusCode::kInvalidArgument, HeadKind::kLm,
                  config);
  };
  const ModelConfig config = TinyConfig("qwen3_moe", {{"num_experts", 6}});
  for (const MegatronOptions& options :
       {MegatronOptions{.expert_model_parallel_size = 2},
        MegatronOptions{.context_parallel_size = 2, .expert_model_parallel_size = 6}}) {
    EXPECT_TRUE(CheckMegatronOptions(options, config, HeadKind::kLm, 6).ok());
  }
  expect({.expert_model_parallel_size = 0}, 1, "got 0", config);
  expect({.context_parallel_size = 2, .expert_model_parallel_size = 4}, 6,
         "4 does not divide the 6 ranks that hold the same layers: context_parallel_size 2 x 3 "
         "replicas",
         config);
  expect({.expert_model_parallel_size = 4}, 4,
         "4 does not divide config.json.num_experts, which is 6", config);
  expect({.expert_model_parallel_size = 2}, 2,
         "2 ranks cannot divide the experts of a llama model, which has none", Config());
  expect({.expert_model_parallel_size = 2}, 2,
         "2 does not divide config.json.num_local_experts, which is 5", TinyConfig("mixtral"));
}

TEST(MegatronOptionsTest, AReplicaDividesTheWorld) {
  ExpectRefused({.tensor_model_parallel_size = 2,
                 .pipeline_model_parallel_size = 3,
                 .context_parallel_size = 2},
                18, "strategy.tensor_model_parallel_size",
                "2 x context_parallel_size 2 x pipeline_model_parallel_size 3 = 12 ranks hold one "
                "replica of the model, which does not divide the server's 18");
}

TEST(MegatronOptionsTest, HeadsAndWidthsDivide) {
  const char* const field = "strategy.tensor_model_parallel_size";
  const MegatronOptions eight = {.tensor_model_parallel_size = 8};
  ExpectRefused(eight, 8, field, "8 does not divide config.json.num_key_value_heads, which is 4");
  ExpectRefused({.tensor_model_parallel_size = 3}, 3, field,
                "3 does not divide config.json.num_attention_heads, which is 8");
  ModelConfig config = Config();
  config.intermediate_size = 50;
  ExpectRefused({.tensor_model_parallel_size = 4}, 4, field,
                "4 does not divide config.json.intermediate_size, which is 50",
                absl::StatusCode::kInvalidArgument, HeadKind::kLm, config);
  config = Config();
  config.vocab_size = 5;
  ExpectRefused({.tensor_model_parallel_size = 4}, 4, field,
                "vocab_size, which is 5, leaves the last of 4 shards without a row",
                absl::StatusCode::kInvalidArgument, HeadKind::kValue, config);
}

TEST(MegatronOptionsTest, OutputRanksHaveConsecutiveTokenIds) {
  const MegatronOptions options = {.tensor_model_parallel_size = 2, .context_parallel_size = 2};
  // 61 rows are 31 and 30; of those 16 and 15, and 15 and 15. The last two have no token.
  std::vector<int64_t> numbers;
  for (const OutputRank& rank : {OutputRank{0, 0}, {0, 1}, {1, 0}, {1, 1}}) {
    const TokenRange range = OutputTokens(options, 61, 59, rank);
    numbers.insert(numbers.end(), {range.first, range.size});
  }
  EXPECT_EQ(numbers, (std::vector<int64_t>{0, 16, 16, 15, 31, 15, 46, 13}));
}

TEST(MegatronOptionsTest, EveryOutputRankHasATokenId) {
  const MegatronOptions options = {.tensor_model_parallel_size = 4, .context_parallel_size = 2};
  ModelConfig config = Config();
  EXPECT_TRUE(CheckMegatronOptions(options, config, HeadKind::kLm, 8).ok());
  config.vocab_size = 61;
  EXPECT_TRUE(CheckMegatronOptions(options, config, HeadKind::kLm, 8).ok());
  // Rows of the last two ranks: 48 .. 54 and 55 .. 60.
  EXPECT_TRUE(CheckMegatronOptions(options, config, HeadKind::kLm, 8, 56).ok());
  const absl::Status status = CheckMegatronOptions(options, config, HeadKind::kLm, 8, 55);
  EXPECT_EQ(FieldPath(status), "strategy.context_parallel_size");
  EXPECT_NE(status.message().find("55 token ids in 61 rows leave rank 7 of them without one"),
            absl::string_view::npos)
      << status;
  EXPECT_TRUE(CheckMegatronOptions(options, config, HeadKind::kValue, 8, 55).ok());
}

TEST(MegatronOptionsTest, EveryVirtualStageHasALayer) {
  ExpectRefused({.pipeline_model_parallel_size = 7}, 7, "strategy.pipeline_model_parallel_size",
                "7 stages need 7 layers, but config.json.num_hidden_layers is 6");
  ExpectRefused(
      {.pipeline_model_parallel_size = 2, .virtual_pipeline_model_parallel_size = 4}, 2,
      "strategy.virtual_pipeline_model_parallel_size",
      "2 stages of 4 virtual stages need 8 layers, but config.json.num_hidden_layers is 6");
  ExpectRefused(
      {.virtual_pipeline_model_parallel_size = 2}, 1,
      "strategy.virtual_pipeline_model_parallel_size",
      "2 virtual stages per stage need a pipeline, but pipeline_model_parallel_size is 1");
}

}  // namespace
}  // namespace tandem::parallel
