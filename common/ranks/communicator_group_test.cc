#include "common/ranks/communicator_group.h"

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>

#include "common/ops/experts/expert_exchange.h"
#include "common/ops/shards/token_shards.h"
#include "common/ranks/testing/rank_processes.h"

namespace tandem::ranks {
namespace {

using Group = std::shared_ptr<ops::TensorParallelGroup>;

constexpr int64_t kTokens[] = {1, 3, 7, 8};

// Returns values that differ by rank, row and column.
at::Tensor Values(int64_t rank, int64_t rows) {
  return (at::arange(rows * 6, at::kDouble).view({rows, 2, 3}) + 100.0 * static_cast<double>(rank))
      .sin();
}

at::Tensor SumOfValues(int64_t ranks, int64_t rows) {
  at::Tensor sum = at::zeros({rows, 2, 3}, at::kDouble);
  for (int64_t rank = 0; rank < ranks; ++rank) sum += Values(rank, rows);
  return sum;
}

// Appends rows of zeros, up to the number of rows of all ranks together.
at::Tensor Padded(const at::Tensor& x, int64_t rows) {
  return at::cat({x, at::zeros({rows - x.size(0), 2, 3}, at::kDouble)});
}

class CommunicatorGroupTest : public testing::TestWithParam<int> {
 protected:
  int64_t size() const { return GetParam(); }
  int64_t RowsOfShard(int64_t tokens) const { return (tokens + size() - 1) / size(); }
  void RunOnAll(const std::function<void(const Group&, Communicator&)>& body) const {
    RunConnected(GetParam(), [&](const std::shared_ptr<Communicator>& ranks) {
      body(std::make_shared<CommunicatorGroup>(ranks), *ranks);
    });
  }
};

INSTANTIATE_TEST_SUITE_P(Ranks, CommunicatorGroupTest, testing::Values(1, 2, 4));

TEST_P(CommunicatorGroupTest, SumsAndMaximaLeaveTheirInputs) {
  RunOnAll([&](const Group& group, Communicator&) {
    const at::Tensor values = Values(group->rank(), 5).transpose(1, 2);
    const at::Tensor sum = group->Sum(values), maximum = group->Max(values);
    at::Tensor expected = Values(0, 5);
    for (int64_t rank = 1; rank < size(); ++rank) expected = at::max(expected, Values(rank, 5));
    EXPECT_TRUE(at::allclose(sum, SumOfValues(size(), 5).transpose(1, 2), 1e-14, 1e-14));
    EXPECT_TRUE(at::equal(maximum, expected.transpose(1, 2)));
    EXPECT_TRUE(at::equal(values, Values(group->rank(), 5).transpose(1, 2)));
  });
}

TEST_P(CommunicatorGroupTest, TokensAreGatheredAndTheirGradientsSummed) {
  RunOnAll([&](const Group& group, Communicator&) {
    for (const int64_t tokens : kTokens) {
      const int64_t rows = RowsOfShard(tokens), first = group->rank() * rows;
      const at::Tensor whole = Values(9, rows * size());  // no zeros in the padding
      at::Tensor shard = whole.narrow(0, first, rows).clone();
      shard.requires_grad_();
      const at::Tensor gathered = ops::GatherTokens(shard, tokens, group);
      EXPECT_TRUE(at::equal(gathered.detach(), whole.narrow(0, 0, tokens))) << tokens;
      gathered.backward(Values(group->rank(), tokens));
      const at::Tensor expected = Padded(SumOfValues(size(), tokens), rows * size());
      EXPECT_TRUE(at::allclose(shard.grad(), expected.narrow(0, first, rows), 1e-14, 1e-14))
          << tokens;
    }
  });
}

TEST_P(CommunicatorGroupTest, SumsAreScatteredAndTheirGradientsGathered) {
  RunOnAll([&](const Group& group, Communicator&) {
    for (const int64_t tokens : kTokens) {
      const int64_t rows = RowsOfShard(tokens), first = group->rank() * rows;
      at::Tensor partial = Values(group->rank(), tokens).requires_grad_();
      const at::Tensor shard = ops::ScatterSum(partial, group);
      const at::Tensor expected = Padded(SumOfValues(size(), tokens), rows * size());
      EXPECT_TRUE(at::allclose(shard.detach(), expected.narrow(0, first, rows), 1e-14, 1e-14))
          << tokens;
      const at::Tensor gradient = Values(9, rows * size());
      shard.backward(gradient.narrow(0, first, rows));
      EXPECT_TRUE(at::equal(partial.grad(), gradient.narrow(0, 0, tokens))) << tokens;
    }
  });
}

TEST_P(CommunicatorGroupTest, ASharedGradientSumsUpToTheWhole) {
  RunOnAll([&](const Group& group, Communicator&) {
    at::Tensor x = Values(9, 3).requires_grad_();
    const at::Tensor y = ops::DivideGradient(x, *group);
    EXPECT_TRUE(at::equal(y.detach(), x.detach()));
    y.backward(Values(7, 3));
    EXPECT_TRUE(at::equal(x.grad() * size(), Values(7, 3)));
  });
}

TEST_P(CommunicatorGroupTest, InferenceTensorsTravelToo) {
  RunOnAll([&](const Group& group, Communicator&) {
    const c10::InferenceMode guard;
    const at::Tensor partial = Values(group->rank(), 7);
    const at::Tensor sum = ops::GatherTokens(ops::ScatterSum(partial, group), 7, group);
    EXPECT_TRUE(at::allclose(sum, SumOfValues(size(), 7), 1e-14, 1e-14));
  });
}

// Volumes count the whole tensor with its padding.
TEST_P(CommunicatorGroupTest, EveryPassIsOneCollective) {
  RunOnAll([&](const Group& group, Communicator& communicator) {
    const int64_t bytes = (size() - 1) * RowsOfShard(7) * 6 * 8;
    const auto expect = [&](int64_t gathers, int64_t scatters) {
      const CommunicationVolume volume = communicator.volume();
      EXPECT_EQ(volume.all_gather.calls, gathers);
      EXPECT_EQ(volume.all_gather.bytes, gathers * bytes);
      EXPECT_EQ(volume.reduce_scatter.calls, scatters);
      EXPECT_EQ(volume.reduce_scatter.bytes, scatters * bytes);
      EXPECT_EQ(volume.bytes(), (gathers + scatters) * bytes);
      communicator.ResetVolume();
    };
    at::Tensor partial = Values(group->rank(), 7).requires_grad_();
    const at::Tensor shard = ops::ScatterSum(partial, group);
    expect(0, 1);
    const at::Tensor gathered = ops::GatherTokens(shard, 7, group);
    expect(1, 0);
    gathered.sum().backward();
    expect(1, 1);
  });
}

// Two experts a rank. Rank r has (r + e) % 3 rows for expert e; rank 0 has none at all.
class ExpertExchangeTest : public CommunicatorGroupTest {
 protected:
  int64_t NumExperts() const { return 2 * size(); }
  static int64_t RowsFor(int64_t rank, int64_t expert) {
    return rank == 0 ? 0 : (rank + expert) % 3;
  }
  // Returns the number of each row of `rank` for `expert`.
  static at::Tensor Rows(int64_t rank, int64_t expert) {
    const int64_t count = RowsFor(rank, expert);
    return at::arange(count, at::kDouble).view({count, 1}) + 100.0 * static_cast<double>(rank) +
           10.0 * static_cast<double>(expert);
  }
  at::Tensor AllRows(int64_t rank) const {
    std::vector<at::Tensor> rows;
    for (int64_t e = 0; e < NumExperts(); ++e) rows.push_back(Rows(rank, e));
    return at::cat(rows);
  }
  std::vector<int64_t> Offsets(int64_t rank) const {
    std::vector<int64_t> offsets = {0};
    for (int64_t e = 0; e < NumExperts(); ++e) {
      offsets.push_back(offsets.back() + RowsFor(rank, e));
    }
    return offsets;
  }
  void RunExchange(const std::function<void(const std::shared_ptr<const ops::ExpertExchange>&,
                                            Communicator&)>& body) const {
    RunConnected(GetParam(), [&](const std::shared_ptr<Communicator>& ranks) {
      const auto group = std::make_shared<ExpertCommunicatorGroup>(ranks);
      body(ops::ExpertExchange::Start(Offsets(ranks->rank()), group, at::kCPU), *ranks);
    });
  }
};

INSTANTIATE_TEST_SUITE_P(Ranks, ExpertExchangeTest, testing::Values(1, 2, 4));

TEST_P(ExpertExchangeTest, RowsArriveByExpertAndReturnInTheirOrder) {
  RunExchange(
      [&](const std::shared_ptr<const ops::ExpertExchange>& exchange, Communicator& communicator) {
        std::vector<at::Tensor> expected;
        std::vector<int64_t> offsets = {0};
        for (int64_t e = 2 * communicator.rank(); e < 2 * communicator.rank() + 2; ++e) {
          offsets.push_back(offsets.back());
          for (int64_t rank = 0; rank < size(); ++rank) {
            expected.push_back(Rows(rank, e));
            offsets.back() += RowsFor(rank, e);
          }
        }
        EXPECT_EQ(exchange->offsets(), offsets);
        const at::Tensor rows = AllRows(communicator.rank());
        const at::Tensor dispatched = exchange->Dispatch(rows);
        EXPECT_TRUE(at::equal(dispatched, at::cat(expected)));
        EXPECT_TRUE(at::equal(exchange->Return(dispatched), rows));
      });
}

// The gradient of a row goes the way of the row. A rank without rows takes part, whether the rows
// have a gradient or the experts alone.
TEST_P(ExpertExchangeTest, GradientsTakeTheSameWay) {
  RunExchange([&](const std::shared_ptr<const ops::ExpertExchange>& exchange,
                  Communicator& communicator) {
    for (const bool rows_train : {true, false}) {
      const at::Tensor rows = AllRows(communicator.rank()).requires_grad_(rows_train);
      at::Tensor weight = at::full({1}, 3.0, at::kDouble).requires_grad_();
      const at::Tensor dispatched = ops::DispatchRows(rows, exchange);
      const at::Tensor outputs =
          dispatched.size(0) > 0 ? dispatched * weight : at::empty({0, 1}, at::kDouble);
      const at::Tensor returned =
          ops::ReturnRows(outputs, dispatched, /*experts_train=*/true, exchange);
      EXPECT_TRUE(at::equal(returned.detach(), rows.detach() * 3));
      (returned * rows.detach()).sum().backward();
      if (rows_train) {
        EXPECT_TRUE(at::equal(rows.grad(), rows.detach() * 3));
      }
      if (dispatched.size(0) == 0) continue;
      EXPECT_EQ(weight.grad().item<double>(), dispatched.detach().square().sum().item<double>());
    }
  });
}

TEST_P(ExpertExchangeTest, RanksThatDoNotDivideTheExpertsAreRefused) {
  RunConnected(GetParam(), [&](const std::shared_ptr<Communicator>& ranks) {
    if (ranks->size() == 1) return;
    const auto group = std::make_shared<ExpertCommunicatorGroup>(ranks);
    EXPECT_THROW(ops::ExpertExchange::Start({0, 0, 0, 0}, group, at::kCPU), c10::Error);
  });
}

}  // namespace
}  // namespace tandem::ranks
