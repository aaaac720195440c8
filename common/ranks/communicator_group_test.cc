#include "common/ranks/communicator_group.h"

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>

#include "common/ops/token_shards.h"
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

}  // namespace
}  // namespace tandem::ranks
