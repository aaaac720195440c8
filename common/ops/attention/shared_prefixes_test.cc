// Attention of sequences that share prefixes, beside that of the same sequences without.
#include "common/ops/attention/shared_prefixes.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "common/ops/ops.h"

namespace tandem::ops {
namespace {

using ::testing::ElementsAre;

TEST(SharedPrefixesTest, ASequenceBeginsWithTheRowsOfTheOneBefore) {
  // Rows 0-4; 5-6 behind 3 of them; 7 behind both; none; 8-9 behind all of the second.
  const SharedPrefixes prefixes({0, 5, 7, 8, 8, 10}, {0, 3, 4, 5, 5});
  EXPECT_THAT(prefixes.runs(0), ElementsAre(RowRun{0, 5}));
  EXPECT_THAT(prefixes.runs(1), ElementsAre(RowRun{0, 3}, RowRun{5, 2}));
  EXPECT_THAT(prefixes.runs(2), ElementsAre(RowRun{0, 3}, RowRun{5, 1}, RowRun{7, 1}));
  EXPECT_THAT(prefixes.runs(3), ElementsAre(RowRun{0, 3}, RowRun{5, 1}, RowRun{7, 1}));
  // Rows that lie side by side are one run.
  EXPECT_THAT(prefixes.runs(4), ElementsAre(RowRun{0, 3}, RowRun{5, 1}, RowRun{7, 3}));
  EXPECT_EQ(prefixes.length(4), 7);
  EXPECT_EQ(prefixes.start(4), 5);
  EXPECT_EQ(prefixes.RowOf(4, 2), 2);
  EXPECT_EQ(prefixes.RowOf(4, 3), 5);
  EXPECT_EQ(prefixes.RowOf(4, 6), 9);
}

TEST(SharedPrefixesTest, ABlockIsCopiedWhereItsRowsDoNotLieSideBySide) {
  const SharedPrefixes prefixes({0, 130, 260}, {0, 100});  // the second has 230 tokens
  EXPECT_THAT(absl::MakeConstSpan(prefixes.blocks(0), 3), ElementsAre(0, 64, 128));
  EXPECT_THAT(absl::MakeConstSpan(prefixes.blocks(1), 4), ElementsAre(0, 260, 158, 222));
  ASSERT_EQ(prefixes.copies().size(), 2u);
  EXPECT_EQ(prefixes.copies()[0].from, (RowRun{64, 36}));
  EXPECT_EQ(prefixes.copies()[1].from, (RowRun{130, 28}));
  EXPECT_EQ(prefixes.copies()[1].to, 296);
  EXPECT_EQ(prefixes.num_rows(), 324);
}

// Trees of prefixes: a branch of a branch, a sequence that is a prefix of the one before, one that
// goes on behind a whole one, and rows enough that a window divides them.
const std::vector<int64_t> kOffsets = {0, 150, 220, 221, 241, 241, 311, 711};
const std::vector<int64_t> kStarts = {0, 100, 130, 0, 20, 20, 64};

// The rows of all tokens, sequence after sequence, and where own rows are among them.
struct Whole {
  at::Tensor rows, own;
  std::vector<int64_t> offsets = {0};
};
Whole WholeSequences(const SharedPrefixes& prefixes) {
  std::vector<int64_t> rows, own;
  Whole whole;
  for (size_t s = 0; s < prefixes.size(); ++s) {
    for (int64_t p = 0; p < prefixes.length(s); ++p) {
      if (p >= prefixes.start(s)) own.push_back(static_cast<int64_t>(rows.size()));
      rows.push_back(prefixes.RowOf(s, p));
    }
    whole.offsets.push_back(static_cast<int64_t>(rows.size()));
  }
  whole.rows = at::tensor(rows);
  whole.own = at::tensor(own);
  return whole;
}

using Leaves = const std::vector<at::Tensor>&;

at::Tensor WithoutSharing(Leaves x, const Whole& whole, const AttentionScores& scores) {
  const auto all = [&](const at::Tensor& one) { return one.index_select(0, whole.rows); };
  return CausalAttention(all(x[0]), all(x[1]), all(x[2]), whole.offsets, scores)
      .index_select(0, whole.own);
}

struct Case {
  int64_t heads, key_value_heads, head_dim, value_dim;
  AttentionScores scores = {};
};
std::vector<Case> Cases() {
  std::vector<Case> cases = {{6, 2, 16, 16}, {18, 1, 12, 8}, {2, 2, 8, 8, {.scale = 0.7}}};
  for (const int64_t window : {1, 5, 64, 70, 110, 300}) {
    cases.push_back({4, 2, 8, 8, {.window = window}});
  }
  cases.push_back({4, 2, 8, 6, {.soft_cap = 1.5}});
  cases.push_back({4, 2, 8, 8, {.window = 70, .soft_cap = 3.0}});
  return cases;
}

class SharedAttentionTest : public testing::Test {
 protected:
  SharedAttentionTest() { at::manual_seed(1); }

  std::vector<at::Tensor> Values(const Case& one) const {
    const int64_t rows = kOffsets.back();
    return {at::randn({rows, one.heads, one.head_dim}),
            at::randn({rows, one.key_value_heads, one.head_dim}),
            at::randn({rows, one.key_value_heads, one.value_dim})};
  }
  at::Tensor Shared(Leaves x, const AttentionScores& scores) const {
    return CausalAttention(x[0], x[1], x[2], kOffsets, scores, {.prefixes = prefixes_});
  }

  const std::shared_ptr<const SharedPrefixes> prefixes_ =
      std::make_shared<const SharedPrefixes>(kOffsets, kStarts);
  const Whole whole_ = WholeSequences(*prefixes_);
};

TEST_F(SharedAttentionTest, RowsHaveTheBitsThatTheyHaveWithoutSharing) {
  for (const Case& one : Cases()) {
    const std::vector<at::Tensor> x = Values(one);
    const at::Tensor training = Shared(x, one.scores);
    EXPECT_TRUE(at::equal(training, WithoutSharing(x, whole_, one.scores))) << one.scores.window;
    const at::NoGradGuard no_grad;
    EXPECT_TRUE(at::equal(training, Shared(x, one.scores))) << one.scores.window;
  }
  // Values that are columns of the keys, as in latent attention.
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> x = Values({6, 1, 24, 16});
  x[2] = x[1].narrow(2, 0, 16);
  EXPECT_TRUE(at::equal(Shared(x, {}), WithoutSharing(x, whole_, {})));
}

// The oracle is autograd through the attention without sharing, in float64: a row's gradient is the
// sum over the sequences that have it.
TEST_F(SharedAttentionTest, GradientsAreThoseOfFloat64) {
  for (const Case& one : Cases()) {
    const std::vector<at::Tensor> values = Values(one);
    const auto leaves = [&](at::ScalarType type) {
      std::vector<at::Tensor> copies;
      for (const at::Tensor& value : values) {
        copies.push_back(value.to(type, false, /*copy=*/true).requires_grad_());
      }
      return copies;
    };
    const std::vector<at::Tensor> exact = leaves(at::kDouble);
    const at::Tensor expected = WithoutSharing(exact, whole_, one.scores);
    const at::Tensor dy = at::randn(expected.sizes(), at::kDouble);
    expected.backward(dy);
    for (const KernelPath path : {KernelPath::kAuto, KernelPath::kAten}) {
      for (const at::ScalarType type : {at::kFloat, at::kDouble}) {
        const std::vector<at::Tensor> mine = leaves(type);
        SetKernelPath(path);
        const at::Tensor y = Shared(mine, one.scores);
        y.backward(dy.to(type));
        SetKernelPath(KernelPath::kAuto);
        const double tolerance = type == at::kFloat ? 1e-5 : 1e-12;
        EXPECT_LE((y - expected).abs().max().item<double>(), tolerance);
        for (size_t i = 0; i < mine.size(); ++i) {
          const at::Tensor wanted = exact[i].grad();
          EXPECT_LE((mine[i].grad() - wanted).abs().max().item<double>(),
                    tolerance * std::max(1.0, wanted.abs().max().item<double>()))
              << i << " " << type << " window " << one.scores.window;
        }
      }
    }
  }
}

TEST_F(SharedAttentionTest, GradientsDoNotDependOnTheThreads) {
  const int threads_before = at::get_num_threads();
  for (const AttentionScores& scores : {AttentionScores{}, {.window = 70}, {.soft_cap = 2.0}}) {
    const std::vector<at::Tensor> values = Values({18, 2, 8, 8});
    std::vector<at::Tensor> gradients;
    for (const int threads : {1, 3}) {
      at::set_num_threads(threads);
      std::vector<at::Tensor> x;
      for (const at::Tensor& value : values) x.push_back(value.clone().requires_grad_());
      Shared(x, scores).pow(2).sum().backward();
      gradients.push_back(
          at::cat({x[0].grad().flatten(), x[1].grad().flatten(), x[2].grad().flatten()}));
    }
    EXPECT_TRUE(at::equal(gradients[0], gradients[1]));
  }
  at::set_num_threads(threads_before);
}

}  // namespace
}  // namespace tandem::ops
