#include "common/parallel/zero/buckets.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <deque>
#include <functional>
#include <memory>
#include <utility>

namespace tandem::parallel {
namespace {

constexpr size_t kBucketsUnderWay = 2;

// A bucket's collective, and what is done with its temporary tensor when it has ended.
struct Bucket {
  ranks::CollectiveHandle handle;
  std::function<void()> finish;

  void Wait() {
    handle.Wait();
    finish();
  }
};

// Calls `start` for the values [from, from + count) of every rank's shard, bucket by bucket.
ranks::CollectiveHandle InBuckets(int64_t ranks, int64_t shard_numel, int64_t bucket_size,
                                  const std::function<Bucket(int64_t from, int64_t count)>& start) {
  const int64_t step = std::max<int64_t>(bucket_size / ranks, 1);
  const auto under_way = std::make_shared<std::deque<Bucket>>();
  for (int64_t from = 0; from < shard_numel; from += step) {
    if (under_way->size() == kBucketsUnderWay) {
      under_way->front().Wait();
      under_way->pop_front();
    }
    under_way->push_back(start(from, std::min(step, shard_numel - from)));
  }
  return ranks::CollectiveHandle([under_way] {
    for (Bucket& bucket : *under_way) bucket.Wait();
  });
}

}  // namespace

ranks::CollectiveHandle ReduceScatterInBuckets(ranks::Communicator& ranks, const at::Tensor& output,
                                               const at::Tensor& input, int64_t bucket_size) {
  if (input.numel() <= bucket_size) return ranks.ReduceScatterAsync(output, input);
  const int64_t shard_numel = output.numel();
  return InBuckets(ranks.size(), shard_numel, bucket_size, [&](int64_t from, int64_t count) {
    // The handle keeps the temporary tensor until the collective has ended.
    const at::Tensor bucket = input.view({-1, shard_numel}).narrow(1, from, count).contiguous();
    return Bucket{.handle = ranks.ReduceScatterAsync(output.narrow(0, from, count), bucket),
                  .finish = [bucket] {}};
  });
}

ranks::CollectiveHandle AllGatherInBuckets(ranks::Communicator& ranks, const at::Tensor& output,
                                           const at::Tensor& input, int64_t bucket_size) {
  if (output.numel() <= bucket_size) return ranks.AllGatherAsync(output, input);
  const int64_t shard_numel = input.numel();
  return InBuckets(ranks.size(), shard_numel, bucket_size, [&](int64_t from, int64_t count) {
    const at::Tensor bucket = at::empty({ranks.size(), count}, output.options());
    const at::Tensor target = output.view({-1, shard_numel}).narrow(1, from, count);
    return Bucket{.handle = ranks.AllGatherAsync(bucket, input.narrow(0, from, count)),
                  .finish = [bucket, target] { target.copy_(bucket); }};
  });
}

}  // namespace tandem::parallel
