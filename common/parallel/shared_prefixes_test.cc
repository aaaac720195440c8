// A pass over sequences that share prefixes, beside one over the same sequences without.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "common/model/passes/router_losses.h"
#include "common/model/testing/image_batches.h"
#include "common/model/testing/tiny_model_dir.h"
#include "common/parallel/testing/tiny_kinds.h"
#include "common/parallel/zero/block_pass.h"

namespace tandem::parallel {
namespace {

// Two groups, one behind the other: three answers to a prompt, of which the last goes on where the
// second begins, and two to another. Models with images have one in the first five tokens.
const std::vector<std::vector<int64_t>> kSequences = {{4, 9, 2, 7, 5, 11, 30, 3, 8, 22, 17},
                                                      {4, 9, 2, 7, 5, 12, 1, 44},
                                                      {4, 9, 2, 7, 5, 12, 31, 2, 5, 19},
                                                      {8, 8, 3, 21, 6, 40, 2, 2},
                                                      {8, 8, 3, 21, 6, 41, 13}};
const std::vector<int64_t> kStarts = {0, 5, 5, 0, 5};

std::vector<int64_t> OwnRows() {
  std::vector<int64_t> rows;
  int64_t begin = 0;
  for (size_t s = 0; s < kSequences.size(); ++s) {
    const auto length = static_cast<int64_t>(kSequences[s].size());
    for (int64_t p = kStarts[s]; p < length; ++p) rows.push_back(begin + p);
    begin += length;
  }
  return rows;
}

// The outcome of a pass forward and back.
struct Outcome {
  at::Tensor hidden;  // of own rows
  std::vector<at::Tensor> gradients;
  at::Tensor router_sums;
};

Outcome PassOver(const TinyKind& kind, bool shares, Recompute recompute) {
  LoadOptions load = LoadOf(kind);
  load.requires_grad = true;
  const auto model = TinyModel(kind.family, {{"tie_word_embeddings", kind.tied}}, load, /*seed=*/3);
  RaggedBatch batch =
      MakeBatchWithImages(*model, kSequences, shares ? kStarts : std::vector<int64_t>());
  EXPECT_EQ(batch.tables.prefixes != nullptr, shares);
  const ExpertOptions& experts = model->config().decoder.experts;
  std::shared_ptr<RouterLosses> losses;
  if (experts.LayersBefore(model->config().num_hidden_layers) > 0) {
    losses = std::make_shared<RouterLosses>(experts, model->config().num_hidden_layers,
                                            RouterLosses::Scales{.load_balancing = 0.05, .z = 0.01},
                                            at::kCPU);
    batch.routing.losses = losses;
  }
  BlockPass pass(*model, std::move(batch), std::make_unique<CausalContext>(), recompute);
  const at::Tensor hidden = pass.ForwardAll();
  const at::Tensor own = at::tensor(OwnRows());
  const at::Tensor upstream =
      at::randn({own.numel(), hidden.size(1)}, at::detail::createCPUGenerator(7),
                at::TensorOptions().dtype(at::kFloat));
  pass.BackwardAll(shares ? upstream
                          : at::zeros_like(hidden).detach().index_copy_(0, own, upstream));
  Outcome outcome = {.hidden = shares ? hidden.detach() : hidden.detach().index_select(0, own),
                     .gradients = {},
                     .router_sums = losses == nullptr ? at::Tensor() : losses->sums()};
  for (const Parameter& parameter : model->DeclaredParameters()) {
    if (parameter.value.grad().defined()) outcome.gradients.push_back(parameter.value.grad());
  }
  return outcome;
}

class SharedPassTest : public testing::TestWithParam<TinyKind> {};

TEST_P(SharedPassTest, HiddenStatesHaveTheSameBitsAndGradientsTheSameSums) {
  const Outcome apart = PassOver(GetParam(), /*shares=*/false, Recompute::kNone);
  const Outcome shared = PassOver(GetParam(), /*shares=*/true, Recompute::kNone);
  EXPECT_TRUE(at::equal(shared.hidden, apart.hidden));
  ASSERT_EQ(shared.gradients.size(), apart.gradients.size());
  ASSERT_FALSE(apart.gradients.empty());
  for (size_t i = 0; i < apart.gradients.size(); ++i) {
    const double scale = std::max(1.0, apart.gradients[i].abs().max().item<double>());
    EXPECT_LE((shared.gradients[i] - apart.gradients[i]).abs().max().item<double>(), 1e-5 * scale)
        << i;
  }
  if (apart.router_sums.defined()) {
    EXPECT_TRUE(at::allclose(shared.router_sums, apart.router_sums, 1e-6, 0));
  }
}

TEST_P(SharedPassTest, RecomputationChangesNoBit) {
  const Outcome kept = PassOver(GetParam(), /*shares=*/true, Recompute::kNone);
  for (const Recompute recompute : {Recompute::kSelective, Recompute::kFull}) {
    const Outcome again = PassOver(GetParam(), /*shares=*/true, recompute);
    EXPECT_TRUE(at::equal(again.hidden, kept.hidden));
    ASSERT_EQ(again.gradients.size(), kept.gradients.size());
    for (size_t i = 0; i < kept.gradients.size(); ++i) {
      EXPECT_TRUE(at::equal(again.gradients[i], kept.gradients[i])) << i;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(EveryFamily, SharedPassTest, testing::ValuesIn(OneKindOfEachFamily()),
                         [](const auto& info) { return NameOf(info.param); });

}  // namespace
}  // namespace tandem::parallel
