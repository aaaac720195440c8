// Context parallelism's division of a batch: every sequence is cut, by tokens, over the ranks of a
// group.
//
// With n ranks a sequence, thought of as padded at its end to a multiple of 2n, is cut into 2n
// sequence chunks of equal length. Rank i holds chunks i and 2n-1-i, so that under a causal mask
// all ranks have the same work: the "zigzag" of Megatron-LM's context parallelism and of
// https://arxiv.org/abs/2407.21783, section 3.3.2. The padding does not exist: the last chunks of a
// sequence may be short or empty, and a rank may hold no token of it.
#ifndef TANDEM_COMMON_PARALLEL_CONTEXT_CONTEXT_SHARD_H_
#define TANDEM_COMMON_PARALLEL_CONTEXT_CONTEXT_SHARD_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "common/model/passes/ragged_batch.h"
#include "common/ranks/communicator.h"

namespace tandem::parallel {

// Numbers of rows of one sequence on one rank: its earlier chunk, then its later one.
struct ChunkRows {
  int64_t early = 0, late = 0;

  int64_t total() const { return early + late; }
};

// The shard that a rank holds of a batch of S sequences and T tokens. The `lengths` determine the
// shards of all ranks, without communication.
struct ContextShard {
  int rank = 0, num_ranks = 1;
  std::vector<int64_t> lengths;  // [S] of the whole sequences

  // This rank's t tokens: the same S sequences, with the positions of the whole ones.
  RaggedBatch batch;
  // [t] int64 on the batch's device, increasing: the rows of the whole batch that this rank holds.
  // Selects this rank's values from a tensor of the whole batch (labels, scales).
  at::Tensor rows;

  ChunkRows Chunks(int of_rank, int64_t sequence) const;
  // Returns a rank's number of rows: t for this one.
  int64_t NumRows(int of_rank) const;
  // Returns the positions of a rank's rows, [t] int64 on the batch's device, as batch.positions for
  // this one.
  at::Tensor Positions(int of_rank) const;
};

// Returns the shard of `rank`, in [0, num_ranks), of a batch of whole sequences.
ContextShard MakeContextShard(const RaggedBatch& whole, int rank, int num_ranks);

// Returns the `local` rows [t, ...] of all ranks in the order of the whole batch: [T, ...].
// Collective over the group that the shard belongs to; no gradient flows through. Throws c10::Error
// as the communicator does.
at::Tensor GatherContextRows(ranks::Communicator& communicator, const ContextShard& shard,
                             const at::Tensor& local);

// The reverse: returns this rank's rows [t, ...] of the sum of all ranks' `whole` [T, ...].
// Collective, without gradient, and with the same errors.
at::Tensor ScatterContextRows(ranks::Communicator& communicator, const ContextShard& shard,
                              const at::Tensor& whole);

}  // namespace tandem::parallel

#endif  // TANDEM_COMMON_PARALLEL_CONTEXT_CONTEXT_SHARD_H_
