#include "services/rollout/service/convert.h"

#include <gtest/gtest.h>

#include <optional>
#include <string>

#include "common/base/errors/error.h"
#include "common/config/server_config.h"

namespace tandem::rollout {
namespace {

v1::Prompt Example() {
  v1::Prompt prompt;
  prompt.add_prompt_token_ids(3);
  prompt.mutable_sampling()->set_max_tokens(4);
  return prompt;
}

TEST(PromptFromProtoTest, UnsetTandemFieldsTakeTheServersDefaults) {
  TandemConfig defaults;
  defaults.selection_strategy = SelectionStrategy::kWord;
  defaults.prob_senior = 0.75;
  v1::Prompt prompt = Example();
  prompt.mutable_tandem()->set_max_gap_tokens(5);
  const auto request = PromptFromProto(prompt, defaults);
  ASSERT_TRUE(request.ok());
  EXPECT_EQ(request->tandem.selection_strategy, SelectionStrategy::kWord);
  EXPECT_EQ(request->tandem.prob_senior, 0.75);
  EXPECT_EQ(request->tandem.max_gap_tokens, 5);
  EXPECT_EQ(request->num_samples, 1);
  EXPECT_EQ(request->priority, 0);
  prompt.set_priority(-3);
  EXPECT_EQ(PromptFromProto(prompt, defaults)->priority, -3);
}

TEST(PromptFromProtoTest, EveryFieldOfSpeculativeDecodingIsCarried) {
  v1::Prompt prompt = Example();
  EXPECT_EQ(PromptFromProto(prompt, {})->speculative.method, SpeculativeMethod::kNone);
  prompt.mutable_speculative()->set_method(v1::SPECULATIVE_METHOD_NGRAM);
  SpeculativeParams params = PromptFromProto(prompt, {})->speculative;
  EXPECT_EQ(params.method, SpeculativeMethod::kNgram);
  EXPECT_EQ(params.num_speculative_tokens, 5);
  EXPECT_EQ(params.prompt_lookup_min, 2);
  EXPECT_EQ(params.prompt_lookup_max, 4);
  EXPECT_EQ(params.acceptance_rule, AcceptanceRule::kExact);
  prompt.mutable_speculative()->set_method(v1::SPECULATIVE_METHOD_JUNIOR);
  prompt.mutable_speculative()->set_num_speculative_tokens(7);
  prompt.mutable_speculative()->set_prompt_lookup_min(3);
  prompt.mutable_speculative()->set_prompt_lookup_max(6);
  prompt.mutable_speculative()->set_acceptance_rule(v1::ACCEPTANCE_RULE_REJECTION_SAMPLING);
  params = PromptFromProto(prompt, {})->speculative;
  EXPECT_EQ(params.method, SpeculativeMethod::kJunior);
  EXPECT_EQ(params.num_speculative_tokens, 7);
  EXPECT_EQ(params.prompt_lookup_min, 3);
  EXPECT_EQ(params.prompt_lookup_max, 6);
  EXPECT_EQ(params.acceptance_rule, AcceptanceRule::kRejectionSampling);
}

TEST(PromptFromProtoTest, ErrorsNameTheFieldInsideThePrompt) {
  v1::Prompt prompt = Example();
  prompt.set_num_samples(-1);
  EXPECT_EQ(FieldPath(PromptFromProto(prompt, {}).status()), "num_samples");
  prompt = Example();
  prompt.mutable_sampling()->clear_max_tokens();
  EXPECT_EQ(FieldPath(PromptFromProto(prompt, {}).status()), "sampling.max_tokens");
  prompt.clear_sampling();
  EXPECT_EQ(FieldPath(PromptFromProto(prompt, {}).status()), "sampling");
  prompt = Example();
  prompt.mutable_tandem()->set_selection_strategy(static_cast<types::v1::SelectionStrategy>(9));
  EXPECT_EQ(FieldPath(PromptFromProto(prompt, {}).status()), "tandem.selection_strategy");
  prompt = Example();
  prompt.mutable_speculative()->set_method(static_cast<v1::SpeculativeMethod>(9));
  EXPECT_EQ(FieldPath(PromptFromProto(prompt, {}).status()), "speculative.method");
  prompt.mutable_speculative()->clear_method();
  prompt.mutable_speculative()->set_acceptance_rule(static_cast<v1::AcceptanceRule>(9));
  EXPECT_EQ(FieldPath(PromptFromProto(prompt, {}).status()), "speculative.acceptance_rule");
}

TEST(EngineOptionsTest, ComeFromTheConfig) {
  config::v1::RolloutServerConfig config;
  config.mutable_senior()->set_model("s");
  config.mutable_junior()->set_model("j");
  config.set_max_queue(7);
  config.mutable_compute()->set_num_threads(3);
  config.mutable_compute()->set_dtype("bfloat16");
  config.mutable_compute()->set_kernels("aten");
  config.mutable_senior()->set_model_revision(std::string(40, 'a'));
  config.mutable_junior()->set_model_revision(std::string(40, 'b'));
  config.set_kv_cache_bytes(1 << 20);
  config.mutable_tandem()->set_prob_senior(0.25);
  config.set_on_weight_update(config::v1::ON_WEIGHT_UPDATE_KEEP);
  config.mutable_senior()->set_tensor_parallel_size(4);
  config.mutable_junior()->set_tensor_parallel_size(2);
  config.mutable_junior()->set_enable_expert_parallel(true);
  config.set_heartbeat_timeout_seconds(3);
  config.mutable_senior()->set_max_model_len(100);
  config.mutable_junior()->set_max_model_len(50);
  config.mutable_senior()->set_dtype("float32");
  ASSERT_TRUE(config::Resolve(&config).ok());
  const EngineOptions options =
      ToEngineOptions(config, {.rank = 1, .world_size = 4, .local_rank = 1});
  EXPECT_EQ(options.senior.model, "s");
  EXPECT_EQ(options.junior.model, "j");
  EXPECT_EQ(options.senior.max_model_len, 100);
  EXPECT_EQ(options.junior.max_model_len, 50);
  EXPECT_EQ(options.senior.dtype, DType::kFloat32);
  EXPECT_EQ(options.junior.dtype, DType::kBFloat16);
  EXPECT_EQ(options.senior.quantization, Quantization::kNone);
  EXPECT_EQ(options.senior.model_revision, std::string(40, 'a'));
  EXPECT_EQ(options.junior.model_revision, std::string(40, 'b'));
  EXPECT_EQ(options.kv_cache_bytes, 1 << 20);
  EXPECT_EQ(options.kv_cache_dtype, std::nullopt);
  EXPECT_EQ(options.compute.product_rows, 0);
  EXPECT_EQ(options.senior.gpu_memory_utilization, std::nullopt);
  EXPECT_EQ(options.max_queue, 7);
  EXPECT_EQ(options.max_num_seqs, 64);
  EXPECT_EQ(options.compute.num_threads, 3);
  EXPECT_EQ(options.compute.device, "cpu");
  EXPECT_EQ(options.compute.dtype, "bfloat16");
  EXPECT_EQ(options.compute.kernels, "aten");
  EXPECT_TRUE(options.tandem.enabled);
  EXPECT_EQ(options.tandem.prob_senior, 0.25);
  EXPECT_EQ(options.on_weight_update, OnWeightUpdate::kKeep);
  EXPECT_FALSE(options.allow_not_finite_weights);
  EXPECT_EQ(options.environment.rank, 1);
  EXPECT_EQ(options.compute.local_rank, 1);
  EXPECT_EQ(options.compute.ranks_per_gpu, 1);
  EXPECT_EQ(options.compute.gpu(), 1);
  EXPECT_EQ(options.layout.tensor_parallel_size, 4);
  EXPECT_EQ(options.layout.junior_tensor_parallel_size, 2);
  EXPECT_FALSE(options.layout.enable_expert_parallel);
  EXPECT_TRUE(options.layout.junior_enable_expert_parallel);
  EXPECT_EQ(options.rank_timeouts.silence, absl::Seconds(3));
  EXPECT_EQ(options.rank_timeouts.collective, absl::Seconds(600));
  // Settings of a single rank are not compared.
  config.mutable_server()->set_grpc_port(1);
  EXPECT_EQ(ToEngineOptions(config, {}).configuration, options.configuration);
  config.set_max_queue(8);
  EXPECT_NE(ToEngineOptions(config, {}).configuration, options.configuration);
}

TEST(EngineOptionsTest, LanesAreQuantisedEachForItself) {
  config::v1::RolloutServerConfig config;
  config.mutable_senior()->set_model("s");
  config.mutable_junior()->set_model("j");
  config.mutable_senior()->set_quantization(types::v1::QUANTIZATION_INT8);
  config.mutable_junior()->set_quantization(types::v1::QUANTIZATION_INT4);
  config.set_kv_cache_dtype("bfloat16");
  ASSERT_TRUE(config::Resolve(&config).ok());
  const EngineOptions options = ToEngineOptions(config, {});
  EXPECT_EQ(options.senior.quantization, Quantization::kInt8);
  EXPECT_EQ(options.junior.quantization, Quantization::kInt4);
  EXPECT_EQ(options.kv_cache_dtype, DType::kBFloat16);
}

TEST(InfoToProtoTest, EveryLaneTellsItsTypeAndItsQuantisation) {
  EngineInfo info;
  info.senior.max_model_len = 100;
  info.senior.dtype = DType::kBFloat16;
  info.junior.emplace();
  info.junior->max_model_len = 50;
  info.junior->quantization = Quantization::kInt4;
  v1::GetServerInfoResponse response;
  InfoToProto(info, {}, {}, /*paused=*/false, &response);
  EXPECT_EQ(response.server().model().dtype(), types::v1::DATA_TYPE_BFLOAT16);
  EXPECT_EQ(response.server().model().quantization(), types::v1::QUANTIZATION_NONE);
  EXPECT_EQ(response.server().model().max_model_len(), 100);
  EXPECT_EQ(response.junior().dtype(), types::v1::DATA_TYPE_FLOAT32);
  EXPECT_EQ(response.junior().quantization(), types::v1::QUANTIZATION_INT4);
  EXPECT_EQ(response.junior().max_model_len(), 50);
}

TEST(InfoToProtoTest, ASpeculatorTellsItsHeads) {
  EngineInfo info;
  info.speculator_heads = 3;
  v1::GetServerInfoResponse response;
  InfoToProto(info, {}, {}, /*paused=*/false, &response);
  EXPECT_EQ(response.speculator_heads(), 3);
}

}  // namespace
}  // namespace tandem::rollout
