// Collectives over large tensors, a bucket at a time.
#ifndef TANDEM_COMMON_PARALLEL_BUCKETS_H_
#define TANDEM_COMMON_PARALLEL_BUCKETS_H_

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "common/parallel/communicator.h"

namespace tandem::parallel {

// As Communicator::ReduceScatterAsync and AllGatherAsync, with the same result and volume. A tensor
// of more than `bucket_size` values goes in buckets of so many, one after the other, when Wait is
// called: what is needed beside the tensors is of the size of a bucket.
Pending ReduceScatterInBuckets(Communicator& ranks, const at::Tensor& output,
                               const at::Tensor& input, int64_t bucket_size);
Pending AllGatherInBuckets(Communicator& ranks, const at::Tensor& output, const at::Tensor& input,
                           int64_t bucket_size);

}  // namespace tandem::parallel

#endif  // TANDEM_COMMON_PARALLEL_BUCKETS_H_
