// The models against an oracle in float64, and what their configs refuse.
#include "common/speculator/speculator.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "common/base/errors/error.h"
#include "common/speculator/heads/arctic_lstm_speculator.h"
#include "common/speculator/heads/mlp_speculator.h"
#include "common/speculator/testing/cases.h"
#include "common/speculator/testing/oracle.h"

namespace tandem::speculator {
namespace {

using nlohmann::json;
using testing::HasSubstr;

constexpr int64_t kRows = 7;

class SpeculatorTest : public testing::TestWithParam<Case> {
 protected:
  SpeculatorTest() { at::manual_seed(5); }

  const at::Tensor hidden_ = at::randn({kRows, kHidden}, at::kDouble);
  const at::Tensor tokens_ = at::randint(kVocabulary, {kSteps, kRows}, at::kLong);
};

INSTANTIATE_TEST_SUITE_P(Kinds, SpeculatorTest, testing::ValuesIn(Cases()), NameOf);

// Returns the greatest difference from the oracle's logits, of their magnitude.
double LogitError(const Speculator& speculator, const at::Tensor& hidden,
                  const at::Tensor& tokens) {
  const Oracle oracle(speculator);
  std::vector<int64_t> offsets = {0, 4, kRows};
  const std::vector<at::Tensor> states =
      speculator.States({.hidden = hidden, .offsets = offsets}, tokens.unbind());
  double error = 0, magnitude = 0;
  for (int64_t row = 0; row < kRows; ++row) {
    std::vector<int64_t> of_row;
    for (int64_t step = 0; step < kSteps; ++step) {
      of_row.push_back(tokens[step][row].item<int64_t>());
    }
    const auto expected = oracle.Logits(ToMatrix(hidden[row]).values, of_row);
    for (int64_t step = 0; step < kSteps; ++step) {
      const at::Tensor logits = speculator.Logits(step, states[static_cast<size_t>(step)]);
      const Numbers actual = ToMatrix(logits[row]).values;
      const Numbers& wanted = expected[static_cast<size_t>(step)];
      EXPECT_EQ(actual.size(), wanted.size());
      for (size_t id = 0; id < wanted.size(); ++id) {
        EXPECT_TRUE(std::isfinite(actual[id]));
        error = std::max(error, std::abs(actual[id] - wanted[id]));
        magnitude = std::max(magnitude, std::abs(wanted[id]));
      }
    }
  }
  EXPECT_GT(magnitude, 0.1);
  return error / magnitude;
}

TEST_P(SpeculatorTest, LogitsAreTheOracles) {
  const auto exact = TinySpeculator(GetParam().config, {.dtype = at::kDouble});
  EXPECT_LT(LogitError(*exact, hidden_, tokens_), 1e-12);
  const auto single = TinySpeculator(GetParam().config);
  EXPECT_LT(LogitError(*single, hidden_.to(at::kFloat), tokens_), 1e-6);
  const auto ids = TinySpeculator(GetParam().config, {.num_token_ids = 9, .dtype = at::kDouble});
  EXPECT_LT(LogitError(*ids, hidden_, tokens_), 1e-12);
}

TEST_P(SpeculatorTest, DraftsAreTheOracles) {
  for (const int64_t num_token_ids : {0, 2}) {
    const auto speculator = TinySpeculator(GetParam().config, {.num_token_ids = num_token_ids});
    const Oracle oracle(*speculator);
    const at::Tensor hidden = hidden_.to(at::kFloat);
    for (int64_t count = 1; count <= kSteps; ++count) {
      const auto drafts = speculator->Draft(hidden, tokens_[0], count);
      ASSERT_TRUE(drafts.ok()) << drafts.status();
      ASSERT_EQ(drafts->sizes(), at::IntArrayRef({kRows, count}));
      for (int64_t row = 0; row < kRows; ++row) {
        const auto expected =
            oracle.Draft(ToMatrix(hidden[row]).values, tokens_[0][row].item<int64_t>(), count);
        for (int64_t i = 0; i < count; ++i) {
          EXPECT_EQ((*drafts)[row][i].item<int64_t>(), expected[static_cast<size_t>(i)]);
        }
      }
    }
  }
}

TEST_P(SpeculatorTest, TheLowestOfEqualIdsIsDrafted) {
  const auto speculator = TinySpeculator(GetParam().config);
  speculator->buffer().zero_();
  EXPECT_EQ(speculator->Draft(hidden_, tokens_[0], kSteps)->count_nonzero().item<int64_t>(), 0);
}

TEST_P(SpeculatorTest, BadDraftsAreRefused) {
  const auto speculator = TinySpeculator(GetParam().config);
  const auto field = [&](const at::Tensor& hidden, const at::Tensor& tokens, int64_t count) {
    return FieldPath(speculator->Draft(hidden, tokens, count).status());
  };
  EXPECT_EQ(field(hidden_, tokens_[0], 0), "count");
  EXPECT_EQ(field(hidden_, tokens_[0], kSteps + 1), "count");
  EXPECT_EQ(field(hidden_.narrow(1, 0, 4), tokens_[0], 1), "hidden");
  EXPECT_EQ(field(hidden_, tokens_[0].narrow(0, 0, 2), 1), "tokens");
  EXPECT_EQ(field(hidden_, tokens_[0].to(at::kInt), 1), "tokens");
}

TEST_P(SpeculatorTest, InitialValuesAreThoseOfTheSeed) {
  const json config = GetParam().config;
  const ConfigFields fields(config, "config.json");
  const auto make = [&](uint64_t seed) {
    return std::move(RandomSpeculator(*KindOfConfig(fields).value(), fields, seed, {})).value();
  };
  const auto a = make(1), same = make(1), other = make(2);
  for (size_t i = 0; i < a->parameters().size(); ++i) {
    const SpeculatorParameter& parameter = a->parameters()[i];
    EXPECT_TRUE(at::equal(parameter.value, same->parameters()[i].value));
    if (parameter.spec.init == Init::kNormal) {
      EXPECT_FALSE(at::equal(parameter.value, other->parameters()[i].value));
    } else {
      const double constant = parameter.spec.init == Init::kOnes ? 1 : 0;
      EXPECT_TRUE(parameter.value.eq(constant).all().item<bool>()) << parameter.spec.name;
    }
  }
}

TEST(SpeculatorInitTest, TheDeviationIsTheReferences) {
  const auto deviation = [](const json& config, const char* name) {
    const ConfigFields fields(config, "config.json");
    const auto speculator = RandomSpeculator(*KindOfConfig(fields).value(), fields, 7, {});
    return (*speculator)->Value(name).std().item<double>();
  };
  const json mlp = MlpJson({{"vocab_size", 400}, {"emb_dim", 64}, {"inner_dim", 256}});
  EXPECT_NEAR(deviation(mlp, "emb.0.weight"), 1.0 / 16, 0.002);
  EXPECT_NEAR(deviation(mlp, "proj.0.weight"), 1.0 / 16, 0.002);
  const json lstm = ArcticJson({{"vocab_size", 400},
                                {"input_hidden_dim", 64},
                                {"inner_dim", 256},
                                {"proj_dim", 256},
                                {"emb_dim", 256},
                                {"method", "sum_lstm"},
                                {"tie_weights", true}});
  EXPECT_NEAR(deviation(lstm, "cell_emb.0.weight"), 1.0 / 16, 0.002);
  EXPECT_NEAR(deviation(lstm, "cell_proj.0.weight"), 1.0 / 8, 0.004);
  EXPECT_NEAR(deviation(lstm, "cell_proj.1.weight"), 1.0 / 16, 0.002);
}

TEST(SpeculatorKindTest, AKindIsFoundByItsNames) {
  for (const SpeculatorKind* kind : SpeculatorKinds()) {
    EXPECT_EQ(FindSpeculatorKind(kind->name, "speculator").value(), kind);
    for (const std::string& architecture : kind->architectures) {
      EXPECT_EQ(FindSpeculatorKind(architecture, "speculator").value(), kind);
    }
  }
  const absl::Status unknown = FindSpeculatorKind("medusa", "model.speculator").status();
  EXPECT_EQ(unknown.code(), absl::StatusCode::kUnimplemented);
  EXPECT_EQ(FieldPath(unknown), "model.speculator");
  EXPECT_THAT(std::string(unknown.message()), HasSubstr("medusa"));
  EXPECT_THAT(std::string(unknown.message()), HasSubstr("mlp"));
  EXPECT_THAT(std::string(unknown.message()), HasSubstr("arctic_lstm"));
}

struct BadConfig {
  json config;
  std::string field;
  absl::StatusCode code = absl::StatusCode::kInvalidArgument;
};

TEST(SpeculatorConfigTest, FieldsAreRefusedByName) {
  const auto unimplemented = absl::StatusCode::kUnimplemented;
  const std::vector<BadConfig> bad = {
      {MlpJson({{"architectures", nullptr}}), "architectures"},
      {MlpJson({{"architectures", {"A", "B"}}}), "architectures"},
      {MlpJson({{"architectures", {"EagleModel"}}}), "architectures", unimplemented},
      {MlpJson({{"vocab_size", 0}}), "vocab_size"},
      {MlpJson({{"vocab_size", 1 << 25}}), "vocab_size"},
      {MlpJson({{"emb_dim", -1}}), "emb_dim"},
      {MlpJson({{"emb_dim", 1 << 25}}), "emb_dim"},
      {MlpJson({{"inner_dim", "5"}}), "inner_dim"},
      {MlpJson({{"n_predict", 65}}), "n_predict"},
      {MlpJson({{"tie_weights", 1}}), "tie_weights"},
      {MlpJson({{"tie_weights", true}, {"n_predict", 1}}), "tie_weights"},
      {MlpJson({{"scale_input", "no"}}), "scale_input"},
      {ArcticJson({{"vocab_size", nullptr}}), "vocab_size"},
      {ArcticJson({{"input_hidden_dim", nullptr}}), "input_hidden_dim"},
      {ArcticJson({{"input_hidden_dim", 1 << 25}}), "input_hidden_dim"},
      {ArcticJson({{"inner_dim", "five"}}), "inner_dim"},
      {ArcticJson({{"inner_dim", "5.5"}}), "inner_dim", unimplemented},
      {ArcticJson({{"proj_dim", 4}}), "proj_dim"},
      {ArcticJson({{"emb_dim", "4"}}), "emb_dim"},
      {ArcticJson({{"n_predict", nullptr}}), "n_predict"},
      {ArcticJson({{"method", "sum_gru"}}), "method"},
      {ArcticJson({{"method", "sum_lstm"}}), "tie_weights"},
      {ArcticJson({{"tie_lstm_embs", 0}}), "tie_lstm_embs"},
  };
  for (const BadConfig& tested : bad) {
    const ConfigFields fields(tested.config, "config.json");
    const auto kind = KindOfConfig(fields);
    const absl::Status status = kind.ok() ? (*kind)->create(fields, {}).status() : kind.status();
    EXPECT_EQ(FieldPath(status), "config.json." + tested.field) << status;
    EXPECT_EQ(status.code(), tested.code) << status;
  }
}

TEST(SpeculatorConfigTest, OptionsAreRefusedByName) {
  const json config = MlpJson();
  const ConfigFields fields(config, "config.json");
  EXPECT_EQ(FieldPath(MlpSpeculatorKind().create(fields, {.num_token_ids = 12}).status()),
            "num_token_ids");
  const SpeculatorOptions trains = {.requires_grad = true, .packs_heads = true};
  EXPECT_EQ(FieldPath(MlpSpeculatorKind().create(fields, trains).status()), "packs_heads");
  const absl::Status status = MlpSpeculatorKind().create(fields, {.dtype = at::kBFloat16}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented);
  EXPECT_EQ(FieldPath(status), "dtype");
}

TEST(SpeculatorConfigTest, ConfigsThatNoFileGaveAreCheckedToo) {
  EXPECT_EQ(FieldPath(MlpSpeculator::Create({.vocab_size = 9, .emb_dim = 4}, {}).status()),
            "n_predict");
  const ArcticLstmSpeculatorConfig untied = {.vocab_size = 9,
                                             .input_hidden_dim = 4,
                                             .inner_dim = 3,
                                             .proj_dim = 3,
                                             .emb_dim = 3,
                                             .n_predict = 2,
                                             .method = ArcticMethod::kSumLstm};
  EXPECT_EQ(FieldPath(ArcticLstmSpeculator::Create(untied, {}).status()), "tie_weights");
}

TEST(SpeculatorConfigTest, AbsentKeysHaveTheReferencesDefaults) {
  const json empty = json::object();
  const MlpSpeculatorConfig config =
      ReadMlpSpeculatorConfig(ConfigFields(empty, "config.json")).value();
  EXPECT_EQ(config.vocab_size, 32000);
  EXPECT_EQ(config.emb_dim, 4096);
  EXPECT_EQ(config.inner_dim, 0);
  EXPECT_EQ(config.n_predict, 3);
  EXPECT_FALSE(config.tie_weights);
  EXPECT_FALSE(config.scale_input);
}

}  // namespace
}  // namespace tandem::speculator
