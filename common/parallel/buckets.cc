#include "common/parallel/buckets.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <functional>

namespace tandem::parallel {
namespace {

// Calls `transfer` for the values [from, from + count) of every rank's part, bucket by bucket.
Pending InBuckets(int64_t ranks, int64_t part, int64_t bucket_size,
                  std::function<void(int64_t from, int64_t count)> transfer) {
  const int64_t step = std::max<int64_t>(bucket_size / ranks, 1);
  return Pending([=, transfer = std::move(transfer)] {
    for (int64_t from = 0; from < part; from += step) {
      transfer(from, std::min(step, part - from));
    }
  });
}

}  // namespace

Pending ReduceScatterInBuckets(Communicator& ranks, const at::Tensor& output,
                               const at::Tensor& input, int64_t bucket_size) {
  if (input.numel() <= bucket_size) return ranks.ReduceScatterAsync(output, input);
  const int64_t part = output.numel();
  return InBuckets(ranks.size(), part, bucket_size, [=, &ranks](int64_t from, int64_t count) {
    const at::Tensor bucket = input.view({-1, part}).narrow(1, from, count).contiguous();
    ranks.ReduceScatter(output.narrow(0, from, count), bucket);
  });
}

Pending AllGatherInBuckets(Communicator& ranks, const at::Tensor& output, const at::Tensor& input,
                           int64_t bucket_size) {
  if (output.numel() <= bucket_size) return ranks.AllGatherAsync(output, input);
  const int64_t part = input.numel();
  return InBuckets(ranks.size(), part, bucket_size, [=, &ranks](int64_t from, int64_t count) {
    const at::Tensor bucket = at::empty({ranks.size(), count}, output.options());
    ranks.AllGather(bucket, input.narrow(0, from, count));
    output.view({-1, part}).narrow(1, from, count).copy_(bucket);
  });
}

}  // namespace tandem::parallel
