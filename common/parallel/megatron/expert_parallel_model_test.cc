// A model whose ranks hold different experts against the whole one in one process: in training,
// where tokens travel to their experts, and in inference, where tensor-parallel ranks have all
// tokens.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "common/base/errors/error.h"
#include "common/kernels/weight_format.h"
#include "common/model/testing/models.h"
#include "common/model/testing/packed_model.h"
#include "common/parallel/testing/cached_decoder.h"
#include "common/ranks/communicator_group.h"
#include "common/ranks/testing/rank_processes.h"

namespace tandem::parallel {
namespace {

using Ranks = std::shared_ptr<ranks::Communicator>;
using Tokens = std::vector<int64_t>;

constexpr double kTolerance = 1e-5;  // of the largest entry
constexpr int64_t kVocabulary = 61;
constexpr int64_t kExpertCount = 8;

struct Case {
  const char* name;
  const char* family;
  nlohmann::json changes;
  std::vector<std::string> freeze = {};
};

std::vector<Case> Cases() {
  return {{"mixtral", "mixtral", {{"num_local_experts", kExpertCount}}},
          {"qwen2_moe", "qwen2_moe", {{"num_experts", kExpertCount}}},
          {"qwen3_moe", "qwen3_moe", {{"num_experts", kExpertCount}}},
          {"all experts", "qwen3_moe", {{"num_experts", 4}, {"num_experts_per_tok", 4}}},
          {"deepseek_v3",
           "deepseek_v3",
           {{"n_routed_experts", kExpertCount},
            {"n_group", 4},
            {"topk_group", 3},
            {"first_k_dense_replace", 1}}}};
}

nlohmann::json ChangesOf(const Case& c) {
  nlohmann::json changes = c.changes;
  // Sizes that four tensor-parallel ranks divide.
  changes.merge_patch({{"num_attention_heads", 8},
                       {"num_key_value_heads", 4},
                       {"intermediate_size", 48},
                       {"shared_expert_intermediate_size", 20}});
  return changes;
}

std::unique_ptr<Model> MakeModel(const Case& c, bool trains, const Placement& placement) {
  auto model = TinyModel(c.family, ChangesOf(c), {.requires_grad = trains, .placement = placement});
  EXPECT_TRUE(model->LoadParameters(RandomParameters(*model, 3)).ok());
  return model;
}

Placement Experts(const Ranks& ranks) {
  return {.experts = {.index = ranks->rank(), .count = ranks->size()},
          .expert_group = std::make_shared<ranks::ExpertCommunicatorGroup>(ranks)};
}

Placement WholeExperts(const Ranks& ranks, at::ScalarType dtype = at::kFloat) {
  return {.dtype = dtype,
          .shard_index = ranks->rank(),
          .shard_count = ranks->size(),
          .shard_group = std::make_shared<ranks::CommunicatorGroup>(ranks),
          .experts = {.index = ranks->rank(), .count = ranks->size(), .whole = true}};
}

// Batches of different lengths, one of them empty.
RaggedBatch BatchOf(int rank) {
  const std::vector<std::vector<int64_t>> lengths = {{5, 1, 7}, {}, {8}, {1}};
  std::vector<Tokens> sequences;
  for (const int64_t length : lengths[static_cast<size_t>(rank)]) {
    sequences.emplace_back();
    for (int64_t i = 0; i < length; ++i) {
      sequences.back().push_back((rank * 11 + length * 7 + i * i * 13 + i * 5) % kVocabulary);
    }
  }
  return MakeRaggedBatch(sequences);
}

struct Result {
  at::Tensor hidden;
  std::map<std::string, at::Tensor> gradients;
};

Result Train(const Model& model, const RaggedBatch& batch) {
  CausalContext context;
  const at::Tensor hidden = model.HiddenStates(batch, context);
  Result result = {.hidden = hidden.detach(), .gradients = {}};
  hidden.backward((at::arange(hidden.numel()) * 0.37).sin().view(hidden.sizes()));
  for (const Parameter& parameter : model.DeclaredParameters()) {
    if (!parameter.trainable || !parameter.value.defined()) continue;
    const at::Tensor gradient = parameter.value.grad();
    result.gradients[parameter.spec.name] =
        gradient.defined() ? gradient.clone() : at::zeros_like(parameter.value.detach());
  }
  return result;
}

void ExpectClose(const at::Tensor& actual, const at::Tensor& expected, const std::string& what) {
  ASSERT_EQ(actual.sizes(), expected.sizes()) << what;
  const double largest = expected.numel() > 0 ? expected.abs().max().item<double>() : 0;
  EXPECT_LE((actual - expected).abs().max().item<double>(), kTolerance * largest) << what;
}

class ExpertParallelModelTest : public testing::TestWithParam<int> {
 protected:
  static void RunOnAll(const std::function<void(const Ranks&)>& body) {
    ranks::RunConnected(GetParam(), body);
  }
};

INSTANTIATE_TEST_SUITE_P(Ranks, ExpertParallelModelTest, testing::Values(1, 2, 4));

// A token's experts have its row alone, wherever they are, and it adds them up in their order.
TEST_P(ExpertParallelModelTest, ATokenHasTheBitsOfTheWholeModelAndGradientsAddUp) {
  RunOnAll([](const Ranks& ranks) {
    for (const Case& c : Cases()) {
      SCOPED_TRACE(c.name);
      const auto shard = MakeModel(c, true, Experts(ranks));
      const Result actual = Train(*shard, BatchOf(ranks->rank()));
      std::map<std::string, at::Tensor> sums;  // of the gradients of all batches
      for (int rank = 0; rank < ranks->size(); ++rank) {
        const auto alone = MakeModel(c, true, {});
        const Result expected = Train(*alone, BatchOf(rank));
        if (rank == ranks->rank()) {
          EXPECT_TRUE(at::equal(actual.hidden, expected.hidden));
        }
        for (const auto& [name, gradient] : expected.gradients) {
          sums[name] = sums.contains(name) ? sums[name] + gradient : gradient;
        }
      }
      int64_t held = 0;
      for (const Parameter& parameter : shard->DeclaredParameters()) {
        const std::string& name = parameter.spec.name;
        if (name == kLmHeadName || !parameter.trainable) continue;
        if (parameter.spec.expert.has_value()) {
          const auto found = actual.gradients.find(name);
          if (found == actual.gradients.end()) continue;  // another rank's
          ++held;
          ExpectClose(found->second, sums.at(name), name);
          continue;
        }
        at::Tensor sum = actual.gradients.at(name).clone();
        ranks->AllReduce(sum, ranks::Reduction::kSum);
        ExpectClose(sum, sums.at(name), name);
      }
      EXPECT_GT(held, 0);
    }
  });
}

// The numbers of rows, and the rows for other ranks' experts there and back; the backward pass
// sends the rows both ways again.
TEST_P(ExpertParallelModelTest, VolumesFollowTheFormula) {
  RunOnAll([](const Ranks& ranks) {
    for (const Case& c : Cases()) {
      SCOPED_TRACE(c.name);
      const auto shard = MakeModel(c, true, Experts(ranks));
      const ModelConfig& config = shard->config();
      const RoutingRule& routing = config.decoder.experts.routing;
      const RaggedBatch batch = BatchOf(ranks->rank());
      const int64_t layers = [&] {
        int64_t count = 0;
        for (int64_t i = 0; i < config.num_hidden_layers; ++i) {
          count += config.decoder.experts.OfLayer(i) ? 1 : 0;
        }
        return count;
      }();
      ranks->ResetVolume();
      CausalContext context;
      const at::Tensor hidden = shard->HiddenStates(batch, context);
      const ranks::CommunicationVolume forward = ranks->volume();
      ranks->ResetVolume();
      hidden.backward(at::ones_like(hidden));
      const ranks::CommunicationVolume backward = ranks->volume();
      const int64_t n = ranks->size();
      const int64_t used = n > 1 ? 1 : 0;  // a rank with all experts sends nothing
      EXPECT_EQ(forward.all_to_all.calls, used * 3 * layers);
      EXPECT_EQ(backward.all_to_all.calls, used * 2 * layers);
      // Over all ranks, a row that leaves comes back.
      const int64_t counts = (n - 1) * (routing.num_experts / n) * 8 * layers;
      EXPECT_EQ(forward.bytes(), forward.all_to_all.bytes);
      EXPECT_EQ(backward.bytes(), forward.bytes() - counts);
      at::Tensor sent = at::tensor({backward.bytes(), batch.num_tokens()}, at::kLong);
      ranks->AllReduce(sent, ranks::Reduction::kSum);
      const int64_t row_bytes = config.hidden_size * 4;
      const int64_t choices = sent[1].item<int64_t>() * routing.num_experts_per_tok * layers;
      EXPECT_EQ(sent[0].item<int64_t>() % (2 * row_bytes), 0);
      EXPECT_LE(sent[0].item<int64_t>(), 2 * choices * row_bytes);
      // Each of the n ranks holds one nth of the experts.
      if (routing.num_experts_per_tok == routing.num_experts) {
        EXPECT_EQ(sent[0].item<int64_t>(), 2 * choices * (n - 1) / n * row_bytes);
      }
    }
  });
}

TEST_P(ExpertParallelModelTest, InferenceEqualsTrainingForward) {
  RunOnAll([](const Ranks& ranks) {
    const auto shard = MakeModel(Cases()[1], true, Experts(ranks));
    const RaggedBatch batch = BatchOf(ranks->rank());
    CausalContext context;
    const at::Tensor training = shard->HiddenStates(batch, context);
    const at::NoGradGuard no_grad;
    EXPECT_TRUE(at::equal(shard->HiddenStates(batch, context), training.detach()));
  });
}

CachedDecoder Decoder(const Case& c, const Placement& placement) {
  return CachedDecoder(MakeModel(c, /*trains=*/false, placement));
}

TEST_P(ExpertParallelModelTest, TensorParallelRanksWithWholeExpertsDecodeAsTheWholeModel) {
  RunOnAll([](const Ranks& ranks) {
    for (const Case& c : Cases()) {
      SCOPED_TRACE(c.name);
      auto whole = Decoder(c, {}), shard = Decoder(c, WholeExperts(ranks));
      const std::vector<at::Tensor> expected = DecodeSome(whole), actual = DecodeSome(shard);
      for (size_t i = 0; i < expected.size(); ++i) {
        ExpectClose(actual[i], expected[i], "logits");
        at::Tensor of_rank_zero = actual[i].clone();
        ranks->Broadcast(of_rank_zero, 0);
        EXPECT_TRUE(at::equal(of_rank_zero, actual[i])) << "every rank has the same bits";
      }
      for (const Parameter& parameter : shard.model->DeclaredParameters()) {
        if (!parameter.spec.expert.has_value()) continue;
        const int64_t per_rank = parameter.spec.expert->count / ranks->size();
        const bool here = parameter.spec.expert->index / per_rank == ranks->rank();
        EXPECT_EQ(parameter.held(), here) << parameter.spec.name;
        if (!here) continue;
        EXPECT_EQ(parameter.value.numel(), parameter.spec.numel());
      }
    }
  });
}

TEST_P(ExpertParallelModelTest, ADecodedRowDoesNotDependOnItsBatch) {
  RunOnAll([](const Ranks& ranks) {
    for (const Case& c : Cases()) {
      SCOPED_TRACE(c.name);
      auto alone = Decoder(c, WholeExperts(ranks)), batched = Decoder(c, WholeExperts(ranks));
      ExpectRowsDoNotDependOnTheirBatch(alone, batched);
    }
  });
}

TEST_P(ExpertParallelModelTest, PackedExpertsHaveTheBitsOfDenseOnesWithTheirValues) {
  RunOnAll([](const Ranks& ranks) {
    for (const kernels::WeightFormat format : kPackedFormats) {
      SCOPED_TRACE(testing::Message() << "format " << static_cast<int>(format));
      const Case c = Cases()[1];
      Placement placement = WholeExperts(ranks);
      auto dense = Decoder(c, placement);
      placement.weight_format = format;
      auto packed = Decoder(c, placement);
      ExpectBitsOfDenseWeights(packed, dense);
    }
  });
}

// Rounding decides which experts a token takes, unless it takes all.
TEST_P(ExpertParallelModelTest, DecodeInBfloat16StaysClose) {
  RunOnAll([](const Ranks& ranks) {
    const Case c = Cases()[3];
    auto exact = Decoder(c, {}), half = Decoder(c, WholeExperts(ranks, at::kBFloat16));
    const std::vector<at::Tensor> expected = DecodeSome(exact), actual = DecodeSome(half);
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_LE((actual[i] - expected[i]).abs().max().item<double>(),
                0.05 * expected[i].abs().max().item<double>());
    }
  });
}

// Whole experts send what shards of experts do.
TEST_P(ExpertParallelModelTest, DecodeSendsWhatTensorParallelRanksSend) {
  RunOnAll([](const Ranks& ranks) {
    const Case c = Cases()[0];
    Placement shards = WholeExperts(ranks);
    shards.experts = {};
    auto whole = Decoder(c, WholeExperts(ranks)), divided = Decoder(c, shards);
    ranks->ResetVolume();
    whole.Logits({{0, Tokens{5, 1, 7}, 3}});
    const int64_t bytes = ranks->volume().bytes();
    ranks->ResetVolume();
    divided.Logits({{0, Tokens{5, 1, 7}, 3}});
    EXPECT_EQ(ranks->volume().bytes(), bytes);
    EXPECT_EQ(ranks->volume().all_to_all.calls, 0);
  });
}

TEST(ExpertPlacementTest, UnsupportedUsesAreRefused) {
  const Case c = Cases()[2];
  const auto status_of = [&](const Placement& placement, bool trains = false) {
    return Model::Random(TinyConfig(c.family, ChangesOf(c)), 1,
                         {.requires_grad = trains, .placement = placement})
        .status();
  };
  const auto expect = [&](const absl::Status& status, const char* path, const char* says) {
    EXPECT_EQ(FieldPath(status), path) << status;
    EXPECT_NE(std::string(status.message()).find(says), std::string::npos) << status;
  };
  expect(status_of({.experts = {.count = 3}}), "placement.experts",
         "3 does not divide config.json.num_experts, which is 8");
  expect(status_of({.experts = {.index = 2, .count = 2}}), "placement.experts", "shard 2 of 2");
  expect(status_of({.experts = {.count = 2, .whole = true}}), "placement.experts",
         "those of the tensor-parallel ranks");
  expect(status_of({.shard_count = 2, .experts = {.count = 2, .whole = true}}, true),
         "placement.experts", "cannot be trained");
  ranks::RunConnected(2, [&](const Ranks& ranks) {
    Placement wrong = Experts(ranks);
    wrong.experts.index = 1 - ranks->rank();
    expect(status_of(wrong), "placement.expert_group", "of 2, and the experts are shard");
  });
  const auto lone = MakeModel(c, false, {.experts = {.count = 2}});
  CausalContext context;
  EXPECT_THROW(lone->HiddenStates(MakeRaggedBatch({{1, 2}}), context), c10::NotImplementedError);
}

}  // namespace
}  // namespace tandem::parallel
