// Collectives over large tensors, one bucket at a time.
#ifndef TANDEM_COMMON_PARALLEL_ZERO_BUCKETS_H_
#define TANDEM_COMMON_PARALLEL_ZERO_BUCKETS_H_

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "common/ranks/communicator.h"

namespace tandem::parallel {

// As Communicator::ReduceScatterAsync and AllGatherAsync, with the same result and volume. A tensor
// of more than `bucket_size` values travels as several collectives, of at most `bucket_size` values
// each. All of them are started here, in order; two are under way at a time, so that a call with
// more buckets waits for the first ones before it returns. Temporary memory: two buckets.
ranks::CollectiveHandle ReduceScatterInBuckets(ranks::Communicator& ranks, const at::Tensor& output,
                                               const at::Tensor& input, int64_t bucket_size);
ranks::CollectiveHandle AllGatherInBuckets(ranks::Communicator& ranks, const at::Tensor& output,
                                           const at::Tensor& input, int64_t bucket_size);

}  // namespace tandem::parallel

#endif  // TANDEM_COMMON_PARALLEL_ZERO_BUCKETS_H_
