#include "common/parallel/context/ring_attention.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "common/model/testing/image_batches.h"
#include "common/model/testing/models.h"
#include "common/ops/ops.h"
#include "common/parallel/zero/block_pass.h"
#include "common/ranks/testing/rank_processes.h"

namespace tandem::parallel {
namespace {

constexpr int64_t kHeads = 6, kKeyValueHeads = 2, kHeadDim = 10;

// Odd, tiny and empty lengths; the longest takes several tiles, even on one of two ranks.
const std::vector<int64_t> kLengths = {1, 2, 3, 7, 0, 64, 130, 700};

std::vector<std::vector<int64_t>> Sequences(const std::vector<int64_t>& lengths) {
  std::vector<std::vector<int64_t>> sequences;
  int64_t token = 0;
  for (const int64_t length : lengths) {
    std::vector<int64_t>& sequence = sequences.emplace_back();
    for (int64_t i = 0; i < length; ++i) sequence.push_back(++token * 7 % 61);
  }
  return sequences;
}

RaggedBatch Batch(const std::vector<int64_t>& lengths) {
  return MakeRaggedBatch(Sequences(lengths));
}

double Largest(const at::Tensor& x) { return x.abs().max().item<double>(); }

// Returns the largest difference of some rows, relative to the largest entry of all.
double Error(const at::Tensor& actual, const at::Tensor& whole, const at::Tensor& rows) {
  const at::Tensor expected = whole.detach().index_select(0, rows);
  TORCH_CHECK(actual.sizes() == expected.sizes(), actual.sizes(), " for ", expected.sizes());
  return rows.numel() == 0 ? 0 : Largest(actual.to(expected.dtype()) - expected) / Largest(whole);
}

double Error(const at::Tensor& actual, const at::Tensor& expected) {
  return Largest(actual - expected) / Largest(expected);
}

// The operands, the output and the gradients of an attention.
struct Attention {
  at::Tensor q, k, v, dy;  // dy: the gradient of the output y
  at::Tensor y, dq, dk, dv;

  // Returns rows of the operands, as leaves, in `type`.
  Attention Rows(const at::Tensor& rows, at::ScalarType type) const {
    const auto leaf = [&](const at::Tensor& x) {
      return x.detach().index_select(0, rows).to(type).requires_grad_();
    };
    return {leaf(q), leaf(k), leaf(v), leaf(dy).detach(), {}, {}, {}, {}};
  }

  template <typename Attend>
  void Run(const Attend& attend) {
    y = attend(q, k, v);
    y.backward(dy);
    dq = q.grad();
    dk = k.grad();
    dv = v.grad();
  }
};

// Attention over whole sequences in float64, the same on every rank. The operands are exact in all
// types.
Attention WholeAttention(const RaggedBatch& batch, const ops::AttentionScores& scores = {}) {
  at::manual_seed(3);
  const auto random = [&](at::IntArrayRef shape) {
    return at::randn(shape, at::kDouble).to(at::kBFloat16).to(at::kDouble);
  };
  const int64_t tokens = batch.num_tokens();
  Attention whole = {random({tokens, kHeads, kHeadDim}),
                     random({tokens, kKeyValueHeads, kHeadDim}),
                     random({tokens, kKeyValueHeads, kHeadDim}),
                     random({tokens, kHeads * kHeadDim}),
                     {},
                     {},
                     {},
                     {}};
  // Some scores are large: without the running maximum, their exponentials would overflow.
  whole.q *= 4;
  for (at::Tensor* leaf : {&whole.q, &whole.k, &whole.v}) leaf->requires_grad_();
  whole.Run([&](const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
    return ops::CausalAttention(q, k, v, batch.offsets, scores);
  });
  return whole;
}

struct TypeCase {
  at::ScalarType type;
  double tolerance;  // of the largest difference, relative to the largest entry
};

class RingAttentionTest : public testing::TestWithParam<int> {};

INSTANTIATE_TEST_SUITE_P(Ranks, RingAttentionTest, testing::Values(1, 2, 4));

// A batch, and how it attends: to a window that is shorter than a rank's chunk of a sequence, or
// longer; with another scale.
struct WholeCase {
  std::vector<int64_t> lengths;
  ops::AttentionScores scores = {};
};

TEST_P(RingAttentionTest, OutputsAndGradientsAreThoseOfWholeSequences) {
  ranks::RunConnected(GetParam(), [](const std::shared_ptr<ranks::Communicator>& communicator) {
    // In the second batch some ranks have no row.
    for (const auto& [lengths, scores] : {WholeCase{kLengths},
                                          {{2}},
                                          {kLengths, {.window = 2}},
                                          {kLengths, {.window = 37}},
                                          {kLengths, {.window = 300}},
                                          {kLengths, {.scale = 0.05}},
                                          {kLengths, {.soft_cap = 5.0}},
                                          {kLengths, {.window = 37, .soft_cap = 5.0}}}) {
      const RaggedBatch batch = Batch(lengths);
      const ContextShard shard =
          MakeContextShard(batch, communicator->rank(), communicator->size());
      RingContext context(communicator, shard);
      const Attention whole = WholeAttention(batch, scores);
      for (const TypeCase& types :
           {TypeCase{at::kDouble, 1e-13}, {at::kFloat, 1e-5}, {at::kBFloat16, 1e-2}}) {
        Attention own = whole.Rows(shard.rows, types.type);
        own.Run([&, layer = AttentionLayer{.scores = scores}](
                    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
          return context.Attend(layer, shard.batch, q, k, v);
        });
        const auto check = [&](const char* what, const at::Tensor& actual, const at::Tensor& all) {
          ASSERT_EQ(actual.scalar_type(), types.type) << what;
          EXPECT_LT(Error(actual, all, shard.rows), types.tolerance)
              << what << " in " << types.type << " with a window of " << scores.window;
        };
        check("y", own.y, whole.y);
        check("dq", own.dq, whole.dq);
        check("dk", own.dk, whole.dk);
        check("dv", own.dv, whole.dv);
      }
    }
  });
}

TEST_P(RingAttentionTest, WithoutGradientsTheBitsAreTheSame) {
  ranks::RunConnected(GetParam(), [](const std::shared_ptr<ranks::Communicator>& communicator) {
    const RaggedBatch batch = Batch({7, 64});
    const ContextShard shard = MakeContextShard(batch, communicator->rank(), communicator->size());
    RingContext context(communicator, shard);
    const Attention own = WholeAttention(batch).Rows(shard.rows, at::kFloat);
    const at::Tensor with = context.Attend({}, shard.batch, own.q, own.k, own.v);
    EXPECT_TRUE(with.requires_grad());
    const at::NoGradGuard no_grad;
    const at::Tensor without = context.Attend({}, shard.batch, own.q, own.k, own.v);
    EXPECT_FALSE(without.requires_grad());
    EXPECT_TRUE(at::equal(with, without));
  });
}

TEST_P(RingAttentionTest, TheBackwardPassNeedsNoContext) {
  ranks::RunConnected(GetParam(), [](const std::shared_ptr<ranks::Communicator>& communicator) {
    const RaggedBatch batch = Batch({7, 64});
    const ContextShard shard = MakeContextShard(batch, communicator->rank(), communicator->size());
    const Attention whole = WholeAttention(batch);
    Attention own = whole.Rows(shard.rows, at::kDouble);
    own.Run([&](const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
      return RingContext(communicator, shard).Attend({}, shard.batch, q, k, v);
    });
    EXPECT_LT(Error(own.dk, whole.dk, shard.rows), 1e-13);
  });
}

TEST_P(RingAttentionTest, TheVolumeIsThatOfTheFormula) {
  ranks::RunConnected(GetParam(), [](const std::shared_ptr<ranks::Communicator>& communicator) {
    const int rank = communicator->rank(), size = communicator->size();
    const RaggedBatch batch = Batch({1, 5, 130});
    const ContextShard shard = MakeContextShard(batch, rank, size);
    RingContext context(communicator, shard);
    const Attention whole = WholeAttention(batch);
    const int64_t width = 2 * kKeyValueHeads * kHeadDim, tokens = batch.num_tokens();
    const int64_t pairs = width * (tokens - shard.NumRows((rank + 1) % size));
    const int64_t gradients = width * (tokens - shard.NumRows(rank));
    for (const auto& [type, bytes, sum_bytes] :
         {std::tuple{at::kFloat, 4, 4}, {at::kDouble, 8, 8}, {at::kBFloat16, 2, 4}}) {
      const Attention own = whole.Rows(shard.rows, type);
      communicator->ResetVolume();
      const at::Tensor y = context.Attend({}, shard.batch, own.q, own.k, own.v);
      EXPECT_EQ(communicator->volume().send.calls, size - 1);
      EXPECT_EQ(communicator->volume().bytes(), pairs * bytes);
      communicator->ResetVolume();
      y.backward(own.dy);
      EXPECT_EQ(communicator->volume().send.calls, 2 * (size - 1));
      EXPECT_EQ(communicator->volume().bytes(), pairs * bytes + gradients * sum_bytes);
    }
  });
}

// Latent attention: one key for all heads, and values that are its first columns.
TEST_P(RingAttentionTest, ValuesThatAreColumnsOfKeysTravelOnce) {
  ranks::RunConnected(GetParam(), [](const std::shared_ptr<ranks::Communicator>& communicator) {
    constexpr int64_t kValueDim = 7;
    const int rank = communicator->rank(), size = communicator->size();
    const RaggedBatch batch = Batch({1, 5, 0, 130});
    const ContextShard shard = MakeContextShard(batch, rank, size);
    const AttentionLayer layer = {.scores = {.scale = 0.4}, .values_in_keys = true};
    const int64_t tokens = batch.num_tokens();
    at::manual_seed(4);
    const at::Tensor dy = at::randn({tokens, kHeads * kValueDim}, at::kDouble);
    at::Tensor q = at::randn({tokens, kHeads, kHeadDim}, at::kDouble).requires_grad_();
    at::Tensor k = at::randn({tokens, 1, kHeadDim}, at::kDouble).requires_grad_();
    const at::Tensor y =
        ops::CausalAttention(q, k, k.narrow(2, 0, kValueDim), batch.offsets, layer.scores);
    y.backward(dy);

    const auto leaf = [&](const at::Tensor& x) {
      return x.detach().index_select(0, shard.rows).requires_grad_();
    };
    const at::Tensor own_q = leaf(q), own_k = leaf(k);
    RingContext context(communicator, shard);
    communicator->ResetVolume();
    const at::Tensor own_y =
        context.Attend(layer, shard.batch, own_q, own_k, own_k.narrow(2, 0, kValueDim));
    EXPECT_EQ(communicator->volume().bytes(),
              8 * kHeadDim * (tokens - shard.NumRows((rank + 1) % size)));
    own_y.backward(dy.index_select(0, shard.rows));
    EXPECT_LT(Error(own_y.detach(), y, shard.rows), 1e-13);
    EXPECT_LT(Error(own_q.grad(), q.grad(), shard.rows), 1e-13);
    EXPECT_LT(Error(own_k.grad(), k.grad(), shard.rows), 1e-13);
  });
}

TEST_P(RingAttentionTest, RefusesTheShardOfAnother) {
  ranks::RunConnected(GetParam(), [](const std::shared_ptr<ranks::Communicator>& communicator) {
    const ContextShard shard =
        MakeContextShard(Batch({9}), communicator->rank(), communicator->size() + 1);
    EXPECT_THROW(RingContext(communicator, shard), c10::Error);
  });
}

// Returns hidden states, and the gradients of all parameters for the gradient `dy` of the hidden
// states.
at::Tensor RunModel(BlockPass& pass, const at::Tensor& dy) {
  const at::Tensor hidden = pass.ForwardAll();
  pass.BackwardAll(dy);
  return hidden.detach();
}

TEST_P(RingAttentionTest, AModelHasTheHiddenStatesAndGradientsOfOneProcess) {
  ranks::RunConnected(GetParam(), [](const std::shared_ptr<ranks::Communicator>& communicator) {
    constexpr double kTolerance = 1e-5;
    for (const std::string& family : EveryFamily()) {
      for (const std::vector<int64_t>& lengths : {{1, 2, 3, 7, 64, 130}, std::vector<int64_t>{2}}) {
        const auto whole = TinyModel(family, {}, {.requires_grad = true});
        const RaggedBatch batch = MakeBatchWithImages(*whole, Sequences(lengths));
        const auto own = TinyModel(family, {}, {.requires_grad = true});
        at::manual_seed(5);
        const at::Tensor dy = at::randn({batch.num_tokens(), whole->config().hidden_size});
        BlockPass whole_pass(*whole, batch);
        const at::Tensor expected = RunModel(whole_pass, dy);

        const ContextShard shard =
            MakeContextShard(batch, communicator->rank(), communicator->size());
        BlockPass pass(*own, shard.batch, std::make_unique<RingContext>(communicator, shard));
        const at::Tensor hidden = RunModel(pass, dy.index_select(0, shard.rows));
        const at::Tensor gathered = GatherContextRows(*communicator, shard, hidden);
        EXPECT_LT(Error(gathered, expected), kTolerance) << family;
        int without_gradient = 0;
        for (const auto& [name, parameter] : own->Parameters()) {
          const at::Tensor reference = whole->Parameter(name).grad();
          // The head, which no pass runs, and a vision tower without images.
          if (!reference.defined()) {
            ++without_gradient;
            continue;
          }
          at::Tensor gradient =
              parameter.grad().defined() ? parameter.grad() : at::zeros_like(parameter);
          communicator->AllReduce(gradient, ranks::Reduction::kSum);
          EXPECT_LT(Error(gradient, reference), kTolerance) << family << " " << name;
        }
        // An expert that no token chose has no gradient either.
        const bool reads_all = lengths.size() > 1 || !whole->config().vision.has_value();
        if (reads_all && whole->config().decoder.experts.routing.num_experts == 0) {
          EXPECT_EQ(without_gradient, 1) << family;
        }
      }
    }
  });
}

}  // namespace
}  // namespace tandem::parallel
