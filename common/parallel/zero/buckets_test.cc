#include "common/parallel/zero/buckets.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <memory>
#include <stdexcept>
#include <utility>

#include "common/ranks/testing/rank_processes.h"

namespace tandem::parallel {
namespace {

using Ranks = std::shared_ptr<ranks::Communicator>;

constexpr int kRanks = 3;
constexpr int64_t kShard = 1000;
constexpr int64_t kBucket = 600;  // 200 values of every rank: five buckets
constexpr int64_t kBuckets = 5;

at::Tensor OwnValues(int rank, int64_t numel) {
  return (at::arange(numel, at::kFloat) + 1000.0f * static_cast<float>(rank)).sin();
}

// A reduce-scatter and an all-gather in buckets, under way at the same time.
struct Transfers {
  explicit Transfers(ranks::Communicator& ranks)
      : input(OwnValues(ranks.rank(), kRanks * kShard)),
        sum(at::zeros({kShard})),
        own(OwnValues(ranks.rank(), kShard)),
        whole(at::zeros({kRanks * kShard})),
        reducing(ReduceScatterInBuckets(ranks, sum, input, kBucket)),
        gathering(AllGatherInBuckets(ranks, whole, own, kBucket)) {}

  at::Tensor input, sum, own, whole;
  ranks::CollectiveHandle reducing, gathering;
};

void ExpectResults(const Transfers& transfers, int rank) {
  at::Tensor sum = OwnValues(0, kRanks * kShard);
  std::vector<at::Tensor> all = {OwnValues(0, kShard)};
  for (int peer = 1; peer < kRanks; ++peer) {
    sum = sum + OwnValues(peer, kRanks * kShard);
    all.push_back(OwnValues(peer, kShard));
  }
  EXPECT_TRUE(transfers.sum.equal(sum.narrow(0, rank * kShard, kShard)));
  EXPECT_TRUE(transfers.whole.equal(at::cat(all)));
}

TEST(BucketsTest, HaveTheResultOfOneCollective) {
  ranks::RunConnected(kRanks, [](const Ranks& ranks) {
    Transfers transfers(*ranks);
    transfers.reducing.Wait();
    transfers.gathering.Wait();
    ExpectResults(transfers, ranks->rank());
  });
}

// The call that asks for a collective issues it. If Wait did, these ranks would issue theirs in
// different orders: rank 0 drops its handles while an exception unwinds its stack, before the next
// collective, and the others wait after it.
TEST(BucketsTest, AHandleThatIsDroppedIssuesNoCollective) {
  ranks::RunConnected(kRanks, [](const Ranks& ranks) {
    const auto issued = [&] {
      return ranks->volume().reduce_scatter.calls + ranks->volume().all_gather.calls;
    };
    const at::Tensor next = at::zeros({kRanks * kShard});
    const auto gather_next = [&] {
      ranks->AllGather(next, at::full({kShard}, 1.0f + static_cast<float>(ranks->rank())));
    };
    if (ranks->rank() == 0) {
      try {
        const Transfers transfers(*ranks);
        EXPECT_EQ(issued(), 2 * kBuckets);
        throw std::runtime_error("on purpose");
      } catch (const std::runtime_error&) {
      }
      EXPECT_EQ(issued(), 2 * kBuckets);
      gather_next();
    } else {
      Transfers transfers(*ranks);
      EXPECT_EQ(issued(), 2 * kBuckets);
      gather_next();
      transfers.reducing.Wait();
      transfers.gathering.Wait();
      EXPECT_EQ(issued(), 2 * kBuckets + 1);
      ExpectResults(transfers, ranks->rank());
    }
    for (int peer = 0; peer < kRanks; ++peer) {
      EXPECT_TRUE(next.narrow(0, peer * kShard, kShard).eq(1.0 + peer).all().item<bool>());
    }
  });
}

TEST(BucketsTest, AnAssignmentIssuesNoCollective) {
  ranks::RunConnected(kRanks, [](const Ranks& ranks) {
    Transfers first(*ranks), second(*ranks);
    const int64_t issued = ranks->volume().all_gather.calls;
    first.gathering = std::move(second.gathering);  // waits for the first
    EXPECT_EQ(ranks->volume().all_gather.calls, issued);
    first.gathering.Wait();
    first.reducing.Wait();
    second.reducing.Wait();
    ExpectResults(first, ranks->rank());
    ExpectResults(second, ranks->rank());
  });
}

}  // namespace
}  // namespace tandem::parallel
