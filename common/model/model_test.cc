#include "common/model/model.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "common/base/errors/error.h"
#include "common/model/testing/cached_sequences.h"
#include "common/model/testing/image_batches.h"
#include "common/model/testing/models.h"
#include "common/ops/testing/aten_kernels.h"
#include "common/ops/testing/operations.h"

namespace tandem {
namespace {

using Tokens = std::vector<int64_t>;

Tokens SomeTokens(int64_t count, int64_t seed) {
  Tokens tokens;
  for (int64_t i = 0; i < count; ++i) tokens.push_back((seed * 7 + i * i * 13 + i) % 61);
  return tokens;
}

at::Tensor HiddenWithImages(const Model& model, const std::vector<Tokens>& sequences) {
  CausalContext causal;
  return model.HiddenStates(MakeBatchWithImages(model, sequences), causal);
}

at::Tensor FullHidden(const Model& model, const std::vector<Tokens>& sequences) {
  CausalContext causal;
  return model.HiddenStates(MakeRaggedBatch(sequences), causal);
}

double MaxDifference(const at::Tensor& a, const at::Tensor& b) {
  return (a - b).abs().max().item<double>();
}

TEST(ModelTest, EveryFamilyRunsWithItsOptions) {
  const nlohmann::json biased = {{"attention_bias", true}, {"mlp_bias", true}};
  for (const std::string& family : EveryFamily()) {
    const auto model = TinyModel(family, biased);
    const at::Tensor logits = model->ForwardLogits(FullHidden(*model, {SomeTokens(5, 1)}));
    EXPECT_EQ(logits.sizes(), (at::IntArrayRef{5, 61})) << family;
    EXPECT_TRUE(at::isfinite(logits).all().item<bool>());
  }
  EXPECT_TRUE(TinyModel("qwen3")->Parameter("model.layers.1.self_attn.q_norm.weight").defined());
  EXPECT_TRUE(TinyModel("qwen2")->Parameter("model.layers.0.self_attn.k_proj.bias").defined());
  EXPECT_FALSE(TinyModel("llama")->Parameter("model.layers.0.self_attn.k_proj.bias").defined());
}

TEST(ModelTest, UnknownFamilyIsUnimplemented) {
  ModelConfig config = TinyConfig();
  config.model_type = "gpt2";
  const absl::Status status = Model::Random(config, 1).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented);
  EXPECT_EQ(FieldPath(status), "config.json.model_type");
}

TEST(ModelTest, ShardsThatDoNotDivideNameTheField) {
  const nlohmann::json even = {{"vocab_size", 61},  // need not divide
                               {"num_attention_heads", 8},
                               {"num_key_value_heads", 4},
                               {"intermediate_size", 48}};
  const auto refused = [&](const char* field, const nlohmann::json& changed) {
    nlohmann::json changes = even;
    changes.merge_patch(changed);
    const absl::Status status =
        Model::Random(TinyConfig("llama", changes), 1, {.placement = {.shard_count = 4}}).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(FieldPath(status), "placement.shard_count");
    EXPECT_THAT(std::string(status.message()),
                testing::HasSubstr(absl::StrCat("4 does not divide config.json.", field,
                                                ", which is ", changed[field].get<int>())));
  };
  EXPECT_TRUE(Model::Random(TinyConfig("llama", even), 1, {.placement = {.shard_count = 4}}).ok());
  refused("intermediate_size", {{"intermediate_size", 46}});
  // Two heads of 10 rows: the rows would divide.
  refused("num_key_value_heads", {{"num_key_value_heads", 2}});
  refused("num_attention_heads", {{"num_attention_heads", 6}, {"num_key_value_heads", 2}});
}

TEST(ModelTest, AShardWithoutARowOfTheVocabularyIsRefused) {
  const nlohmann::json changes = {{"vocab_size", 5},  // 2 + 2 + 1 + 0
                                  {"num_attention_heads", 8},
                                  {"num_key_value_heads", 4},
                                  {"intermediate_size", 48}};
  const absl::Status status =
      Model::Random(TinyConfig("llama", changes), 1, {.placement = {.shard_count = 4}}).status();
  EXPECT_EQ(FieldPath(status), "placement.shard_count");
  EXPECT_THAT(std::string(status.message()),
              testing::HasSubstr("vocab_size, which is 5, leaves the last of 4 shards without"));
}

TEST(ModelTest, PaddingRowsHaveNoLogitAndNoToken) {
  for (const bool tied : {false, true}) {
    const nlohmann::json changes = {{"tie_word_embeddings", tied}};
    const auto model = TinyModel("llama", changes, {.num_token_ids = 50, .requires_grad = true});
    const auto whole = TinyModel("llama", changes, {.requires_grad = true});
    EXPECT_EQ(model->config().vocab_size, 61);
    EXPECT_EQ(model->output_weight().size(0), 50);
    const at::Tensor hidden = FullHidden(*model, {{3, 7, 49, 0, 21}});
    {
      const at::NoGradGuard no_grad;
      const at::Tensor logits = model->ForwardLogits(hidden);
      EXPECT_TRUE(at::equal(logits, whole->ForwardLogits(hidden).narrow(1, 0, 50)));
    }
    model->ForwardLogits(hidden).square().sum().backward();
    const at::Tensor gradient = model->Parameter(model->lm_head_name()).grad();
    EXPECT_GT(gradient.narrow(0, 0, 50).abs().max().item<double>(), 0);
    EXPECT_EQ(gradient.narrow(0, 50, 11).abs().max().item<double>(), 0);

    const c10::InferenceMode inference_mode;
    CachedSequences sequences(*model, 1, 8);
    EXPECT_TRUE(sequences.Decode({{0, Tokens{49}}}).ok());
    const absl::Status status = sequences.Decode({{0, Tokens{50}}}).status();
    EXPECT_EQ(FieldPath(status), "inputs[0].tokens[0]") << status;
  }
}

TEST(ModelTest, IdsOfTheTokenizerWithoutARowAreNoIdsOfTheModel) {
  const auto model = TinyModel("llama", {}, {.num_token_ids = 64});  // of 61 rows
  EXPECT_EQ(model->num_token_ids(), 61);
  const c10::InferenceMode inference_mode;
  CachedSequences sequences(*model, 1, 8);
  const absl::StatusOr<at::Tensor> hidden = sequences.Decode({{0, Tokens{60}}});
  ASSERT_TRUE(hidden.ok()) << hidden.status();
  EXPECT_EQ(model->ForwardLogits(*hidden).size(1), 61);
  EXPECT_EQ(FieldPath(sequences.Decode({{0, Tokens{61}}}).status()), "inputs[0].tokens[0]");
}

// With the CPU's kernels, in training and without autograd.
TEST(ModelTest, PackedSequencesHaveTheBitsOfSingleOnes) {
  const std::vector<Tokens> sequences = {SomeTokens(1, 1), SomeTokens(70, 2), SomeTokens(9, 3)};
  for (const std::string& family : EveryFamily()) {
    for (const HeadKind head : {HeadKind::kLm, HeadKind::kValue}) {
      const auto trained = TinyModel(family, {}, {.head = head, .requires_grad = true});
      const auto model = TinyModel(family, {}, {.head = head});
      const auto outputs = [&](const Model& one, const std::vector<Tokens>& batch) {
        const c10::InferenceMode guard(&one == model.get());
        const at::Tensor hidden = FullHidden(one, batch);
        return (head == HeadKind::kLm ? one.ForwardLogits(hidden) : one.Values(hidden)).detach();
      };
      const at::Tensor packed = outputs(*model, sequences);
      EXPECT_TRUE(at::equal(outputs(*trained, sequences), packed)) << family;
      int64_t begin = 0;
      for (const Tokens& tokens : sequences) {
        const int64_t count = static_cast<int64_t>(tokens.size());
        EXPECT_TRUE(at::equal(packed.narrow(0, begin, count), outputs(*model, {tokens}))) << family;
        EXPECT_TRUE(at::equal(packed.narrow(0, begin, count), outputs(*trained, {tokens})))
            << family;
        begin += count;
      }
    }
  }
}

// A response is trained with the numbers that it was drawn with: there is one form of latent
// attention.
TEST(ModelTest, LatentAttentionHasTheSameBitsInTrainingAndDecoding) {
  for (const nlohmann::json& changes : {nlohmann::json{{"q_lora_rank", nullptr}},
                                        {{"num_attention_heads", 21}},
                                        {{"first_k_dense_replace", 2}},
                                        {{"first_k_dense_replace", 0}}}) {
    const auto trained = TinyModel("deepseek_v3", changes, {.requires_grad = true});
    const Tokens tokens = SomeTokens(80, 4);
    const at::Tensor training = FullHidden(*trained, {SomeTokens(3, 1), tokens}).detach();
    const auto model = TinyModel("deepseek_v3", changes);
    const c10::InferenceMode guard;
    CachedSequences sequences(*model, 1, 80);
    std::vector<at::Tensor> hidden;
    for (int64_t begin = 0; begin < 80;) {
      const int64_t count = begin < 30 ? 30 : begin < 70 ? 20 : 1;
      hidden.push_back(sequences
                           .Decode({{0,
                                     absl::MakeSpan(tokens).subspan(static_cast<size_t>(begin),
                                                                    static_cast<size_t>(count)),
                                     count}})
                           .value());
      begin += count;
    }
    EXPECT_TRUE(at::equal(at::cat(hidden), training.narrow(0, 3, 80))) << changes.dump();
  }
}

// However the tokens are chunked and batched, a row's bits are those of the whole sequence alone.
TEST(ModelTest, DecodeIsInvariantToChunkingAndBatching) {
  c10::InferenceMode guard;
  for (const std::string& family : EveryFamily()) {
    const auto model = TinyModel(family);
    const Tokens a = SomeTokens(75, 5), b = SomeTokens(40, 6);
    const at::Tensor whole_a = FullHidden(*model, {a}), whole_b = FullHidden(*model, {b});
    CachedSequences sequences(*model, 2, 128);
    const absl::Span<const int64_t> span_a(a), span_b(b);

    const at::Tensor first =
        sequences.Decode({{1, span_b.subspan(0, 7), 7}, {0, span_a.subspan(0, 70), 2}}).value();
    EXPECT_TRUE(at::equal(first.narrow(0, 0, 7), whole_b.narrow(0, 0, 7))) << family;
    EXPECT_TRUE(at::equal(first.narrow(0, 7, 2), whole_a.narrow(0, 68, 2))) << family;
    const at::Tensor silent = sequences.Decode({{1, span_b.subspan(7, 3), 0}}).value();
    EXPECT_EQ(silent.size(0), 0);
    const at::Tensor second =
        sequences.Decode({{0, span_a.subspan(70, 1)}, {1, span_b.subspan(10)}}).value();
    EXPECT_TRUE(at::equal(second[0], whole_a[70])) << family;
    EXPECT_TRUE(at::equal(second[1], whole_b[39])) << family;
  }
}

// A GPU launches each of these operations: a pass of many sequences takes as many as one of few.
TEST(ModelTest, TheOperationsOfADecodeStepDoNotGrowWithItsSequences) {
  const ops::AtenKernels aten;
  const c10::InferenceMode guard;
  for (const std::string family : {"llama", "qwen2", "qwen3", "mistral", "phi3", "gemma3_text"}) {
    const auto model = TinyModel(family);
    const auto operations = [&](int64_t count) {
      const Tokens tokens = SomeTokens(3, 5);
      CachedSequences sequences(*model, count, 128);
      std::vector<CachedSequences::Input> inputs;
      for (int64_t s = 0; s < count; ++s) inputs.push_back({s, absl::MakeSpan(tokens).first(1)});
      EXPECT_TRUE(sequences.Decode(inputs).ok());
      return ops::Operations([&] { EXPECT_TRUE(sequences.Decode(inputs).ok()); });
    };
    const int64_t few = operations(2);
    EXPECT_GT(few, 20) << family;
    EXPECT_EQ(operations(40), few) << family;
  }
}

// Whatever rows are wanted, the experts of every token and layer are those of the whole sequence.
TEST(ModelTest, ACacheRecordsTheExpertsOfEveryToken) {
  c10::InferenceMode guard;
  for (const auto& [family, changes] : {std::pair{"mixtral", nlohmann::json::object()},
                                        {"qwen2_moe", {}},
                                        {"qwen3_moe", {{"num_experts", 300}}},
                                        {"deepseek_v3", {{"first_k_dense_replace", 1}}}}) {
    const auto model = TinyModel(family, changes);
    const Tokens tokens = SomeTokens(75, 5), others = SomeTokens(9, 6);
    const auto layers = static_cast<size_t>(model->config().RoutingLayout().layers);
    std::vector<at::Tensor> chosen(layers);
    RaggedBatch batch = MakeRaggedBatch({tokens});
    batch.routing.chosen = &chosen;
    CausalContext context;
    const at::Tensor whole = model->HiddenStates(batch, context);
    const at::Tensor expected = at::stack(chosen, 1);

    CachedSequences sequences(*model, 3, 128);
    const absl::Span<const int64_t> span(tokens);
    ASSERT_TRUE(sequences.Decode({{0, span.subspan(0, 66), 0, nullptr, true}}).ok());
    sequences.CopyPrefix(0, 2, 66);
    const at::Tensor rows = sequences
                                .Decode({{1, others, 2},
                                         {0, span.subspan(66, 9), 1, nullptr, true},
                                         {2, span.subspan(66, 9)}})
                                .value();
    EXPECT_TRUE(at::equal(rows.narrow(0, 2, 1), whole.narrow(0, 74, 1))) << family;
    for (const int64_t sequence : {0, 2}) {
      EXPECT_TRUE(at::equal(sequences.Routing(sequence, 75).to(at::kLong), expected)) << family;
    }
  }
}

TEST(ModelTest, TruncatedAndCopiedPrefixesContinueExactly) {
  c10::InferenceMode guard;
  const auto model = TinyModel();
  const Tokens tokens = SomeTokens(30, 7);
  const at::Tensor whole = FullHidden(*model, {tokens});
  CachedSequences sequences(*model, 2, 64);
  Tokens wrong = tokens;
  wrong[20] = (wrong[20] + 1) % 61;
  ASSERT_TRUE(sequences.Decode({{0, wrong}}).ok());
  sequences.Truncate(0, 20);
  sequences.CopyPrefix(0, 1, 10);
  const absl::Span<const int64_t> span(tokens);
  const at::Tensor hidden =
      sequences.Decode({{0, span.subspan(20)}, {1, span.subspan(10)}}).value();
  EXPECT_TRUE(at::equal(hidden[0], whole[29]));
  EXPECT_TRUE(at::equal(hidden[1], whole[29]));
}

TEST(ModelTest, BadDecodeInputsChangeNothing) {
  const auto model = TinyModel();
  KvCache cache(model->CacheLayout(), 2);
  for (const at::Tensor& blocks : {cache.keys(0), cache.values(0)}) blocks.fill_(7);
  const std::vector<int32_t> tokens = {1, 2}, outside = {1, 61}, negative = {-1}, many(65, 1);
  const std::vector<int32_t> blocks = {1}, unknown = {2};
  const std::vector<int64_t> last = {1}, twice = {1, 1}, too_high = {2};
  const auto path = [&](const DecodeInput& input) {
    const absl::Status status = model->Decode(cache, {&input, 1}).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    return FieldPath(status);
  };
  EXPECT_EQ(path({blocks, 0, outside, last}), "inputs[0].tokens[1]");
  EXPECT_EQ(path({blocks, 0, negative, {}}), "inputs[0].tokens[0]");
  EXPECT_EQ(path({blocks, 0, {}, {}}), "inputs[0].tokens");
  EXPECT_EQ(path({blocks, -1, tokens, last}), "inputs[0].start");
  EXPECT_EQ(path({blocks, 0, many, last}), "inputs[0].blocks");
  EXPECT_EQ(path({blocks, 63, tokens, last}), "inputs[0].blocks");
  EXPECT_EQ(path({unknown, 0, tokens, last}), "inputs[0].blocks[0]");
  EXPECT_EQ(path({blocks, 0, tokens, twice}), "inputs[0].output_rows[1]");
  EXPECT_EQ(path({blocks, 0, tokens, too_high}), "inputs[0].output_rows[0]");
  EXPECT_TRUE(cache.keys(0).eq(7).all().item<bool>());
  EXPECT_TRUE(cache.values(0).eq(7).all().item<bool>());
}

TEST(ModelTest, InPlaceUpdatesTakeEffectThroughFusedWeights) {
  c10::InferenceMode guard;
  const auto model = TinyModel("qwen2"), other = TinyModel("qwen2", {}, {}, /*seed=*/2);
  const std::vector<Tokens> batch = {SomeTokens(6, 8)};
  EXPECT_GT(MaxDifference(FullHidden(*model, batch), FullHidden(*other, batch)), 1e-3);
  ASSERT_TRUE(model->LoadParameters(other->Parameters()).ok());
  EXPECT_TRUE(at::equal(FullHidden(*model, batch), FullHidden(*other, batch)));
}

TEST(ModelTest, LoadParametersIsAllOrNothing) {
  const auto model = TinyModel();
  const at::Tensor before = model->Parameter("model.norm.weight").clone();
  NamedTensors tensors;
  for (const auto& [name, tensor] : model->Parameters()) tensors.emplace_back(name, tensor + 1);
  const auto expect_refused = [&](const NamedTensors& bad, const std::string& name) {
    const absl::Status status = model->LoadParameters(bad);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_NE(std::string(status.message()).find("'" + name + "'"), std::string::npos) << status;
    EXPECT_TRUE(at::equal(model->Parameter("model.norm.weight"), before));
  };
  NamedTensors bad(tensors.begin(), tensors.end() - 1);
  expect_refused(bad, "lm_head.weight");
  bad = tensors;
  bad.back().second = at::zeros({3});
  expect_refused(bad, "lm_head.weight");
  bad = tensors;
  bad.emplace_back("extra", at::zeros({1}));
  expect_refused(bad, "extra");
}

TEST(ModelTest, ATiedModelTakesOnlyAHeadThatEqualsItsEmbedding) {
  const auto model = TinyModel("llama", {{"tie_word_embeddings", true}}, {});
  NamedTensors tensors = model->Parameters();
  tensors.emplace_back(kLmHeadName, model->Parameter(kEmbeddingName).clone());
  EXPECT_TRUE(model->LoadParameters(tensors).ok());
  tensors.back().second += 1;
  const absl::Status status = model->LoadParameters(tensors);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), testing::HasSubstr("differs from the embedding"));
}

TEST(ModelTest, TiedHeadIsListedOnceAndSharesMemory) {
  const auto model = TinyModel("llama", {{"tie_word_embeddings", true}}, {.requires_grad = true});
  EXPECT_TRUE(model->tied());
  EXPECT_FALSE(model->Parameter("lm_head.weight").defined());
  EXPECT_EQ(model->lm_head_name(), kEmbeddingName);
  EXPECT_TRUE(model->head_rows().dense().is_alias_of(model->Parameter(kEmbeddingName)));
}

TEST(ModelTest, Bfloat16StaysCloseAndCachedEqualsWhole) {
  for (const std::string& family : EveryFamily()) {
    const auto exact = TinyModel(family);
    const auto half = TinyModel(family, {}, {.placement = {.dtype = at::kBFloat16}});
    EXPECT_EQ(half->Parameter(kEmbeddingName).scalar_type(), at::kBFloat16);
    EXPECT_EQ(half->weights_digest(), exact->weights_digest());
    c10::InferenceMode guard;
    const Tokens tokens = SomeTokens(20, 5);
    const at::Tensor logits = half->ForwardLogits(FullHidden(*half, {tokens}));
    const at::Tensor reference = exact->ForwardLogits(FullHidden(*exact, {tokens}));
    EXPECT_EQ(logits.scalar_type(), at::kBFloat16);
    // 8 bits of mantissa through two layers: 3 % of the largest logit.
    const double scale = reference.abs().max().item<double>();
    EXPECT_LE(MaxDifference(logits.to(at::kFloat), reference), 0.03 * scale) << family;
    CachedSequences sequences(*half, 2, 64);
    const absl::Span<const int64_t> span(tokens);
    const at::Tensor first = sequences.Decode({{0, span.subspan(0, 12), 12}}).value();
    sequences.CopyPrefix(0, 1, 12);
    const at::Tensor rest = sequences.Decode({{1, span.subspan(12), 8}}).value();
    const at::Tensor cached = half->ForwardLogits(at::cat({first, rest}));
    EXPECT_LE(MaxDifference(cached.to(at::kFloat), logits.to(at::kFloat)), 0.03 * scale) << family;
  }
}

TEST(ModelTest, Bfloat16TrainsFloatMasters) {
  const auto model =
      TinyModel("qwen3", {}, {.requires_grad = true, .placement = {.dtype = at::kBFloat16}});
  const at::Tensor hidden = FullHidden(*model, {SomeTokens(6, 1), SomeTokens(3, 2)});
  EXPECT_EQ(hidden.scalar_type(), at::kBFloat16);
  model->ForwardLogits(hidden).to(at::kFloat).pow(2).mean().backward();
  const auto exact = TinyModel("qwen3", {}, {.requires_grad = true});
  exact->ForwardLogits(FullHidden(*exact, {SomeTokens(6, 1), SomeTokens(3, 2)}))
      .pow(2)
      .mean()
      .backward();
  for (const auto& [name, parameter] : model->Parameters()) {
    EXPECT_EQ(parameter.scalar_type(), at::kFloat) << name;
    const at::Tensor expected = exact->Parameter(name).grad();
    // 5 % of the gradient's length: bf16 keeps 8 bits, and errors add up over two layers.
    EXPECT_LE((parameter.grad() - expected).norm().item<double>(),
              0.05 * expected.norm().item<double>())
        << name;
  }
}

TEST(ModelTest, AnUpdateThatNobodyAnnouncedIsRefused) {
  const auto model =
      TinyModel("llama", {}, {.requires_grad = true, .placement = {.dtype = at::kBFloat16}});
  const at::NoGradGuard no_grad;
  model->Parameter("model.layers.1.mlp.up_proj.weight").zero_();
  EXPECT_THROW(FullHidden(*model, {{1, 2}}), c10::Error);
  model->OnWeightsChanged();
  EXPECT_NO_THROW(FullHidden(*model, {{1, 2}}));
}

TEST(ModelTest, FrozenParametersHaveNoGradient) {
  const auto model = TinyModel(
      "llama", {}, {.requires_grad = true, .freeze = {"model.layers.0.*", "*q_proj.weight"}});
  FullHidden(*model, {SomeTokens(6, 1)}).pow(2).mean().backward();
  int64_t trainable = 0;
  for (const auto& [name, parameter] : model->Parameters()) {
    const bool frozen = name.find("layers.0.") != std::string::npos ||
                        name.find("q_proj.weight") != std::string::npos;
    EXPECT_EQ(parameter.requires_grad(), !frozen) << name;
    EXPECT_EQ(parameter.grad().defined(), !frozen && name != kLmHeadName) << name;
    trainable += frozen ? 0 : parameter.numel();
  }
  EXPECT_EQ(model->num_trainable_parameters(), trainable);
  EXPECT_EQ(model->Summary(8).num_trainable_parameters, trainable);
  EXPECT_EQ(TinyModel()->num_trainable_parameters(), 0);
  const absl::Status status =
      Model::Random(TinyConfig(), 1, {.requires_grad = true, .freeze = {"nothing"}}).status();
  EXPECT_EQ(FieldPath(status), "freeze[0]");
}

TEST(ModelTest, GradientsReachEveryParameter) {
  for (const std::string& family : EveryFamily()) {
    for (const HeadKind head : {HeadKind::kLm, HeadKind::kValue}) {
      // Every token takes every expert: one that none chose would have no gradient.
      const auto model = TinyModel(
          family,
          {{"num_experts_per_tok", 5}, {"n_routed_experts", 5}, {"n_group", 1}, {"topk_group", 1}},
          {.head = head, .requires_grad = true});
      const at::Tensor hidden = HiddenWithImages(*model, {SomeTokens(6, 1), SomeTokens(3, 2)});
      (head == HeadKind::kLm ? model->ForwardLogits(hidden) : model->Values(hidden))
          .pow(2)
          .mean()
          .backward();
      for (const auto& [name, parameter] : model->Parameters()) {
        if (!parameter.requires_grad()) {
          EXPECT_THAT(name, testing::EndsWith("e_score_correction_bias"));
          continue;
        }
        ASSERT_TRUE(parameter.grad().defined()) << name;
        // A key's bias moves all scores of a row alike: softmax does not see it.
        if (name.find("k_proj.bias") != std::string::npos) continue;
        EXPECT_GT(parameter.grad().abs().max().item<double>(), 0) << name;
      }
    }
  }
}

}  // namespace
}  // namespace tandem
