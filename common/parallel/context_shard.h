// How the sequences of a batch are cut for context parallelism: over the ranks of a group, by
// tokens.
//
// With n ranks a sequence, thought of as padded at its end to a multiple of 2n, is cut into 2n
// chunks of equal length. Rank i holds chunks i and 2n-1-i, so that every rank has the same share
// of the work under a causal mask: the "zigzag" of Megatron-LM's context parallelism and of
// https://arxiv.org/abs/2407.21783, section 3.3.2. The padding is not there: the last chunks of a
// sequence may be short or empty, and a rank may hold nothing of it.
#ifndef TANDEM_COMMON_PARALLEL_CONTEXT_SHARD_H_
#define TANDEM_COMMON_PARALLEL_CONTEXT_SHARD_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "common/model/ragged_batch.h"
#include "common/parallel/communicator.h"

namespace tandem::parallel {

// Rows of one sequence on one rank: those of its earlier chunk, then those of its later one.
struct ChunkRows {
  int64_t early = 0, late = 0;

  int64_t total() const { return early + late; }
};

// What a rank holds of a batch of S sequences and T tokens. `lengths` tell all of it, for every
// rank, without communication.
struct ContextShard {
  int rank = 0, num_ranks = 1;
  std::vector<int64_t> lengths;  // [S] of the whole sequences

  // This rank's t tokens: the same S sequences, at their positions in the whole ones.
  RaggedBatch batch;
  // [t] int64 on the batch's device, increasing: the rows of the whole batch that row 0 .. t-1 of
  // this rank are. What is given by row of the whole batch (labels, scales) is selected with it.
  at::Tensor rows;

  ChunkRows Chunks(int of_rank, int64_t sequence) const;
  // All rows of a rank: t on this one.
  int64_t NumRows(int of_rank) const;
};

// The part of `rank`, which counts from 0 to num_ranks - 1, of a batch of whole sequences.
ContextShard MakeContextShard(const RaggedBatch& whole, int rank, int num_ranks);

// `local` [t, ...] of all ranks in the order of the whole batch: [T, ...]. Collective over the
// group that `shard` was cut for; no gradient flows through. Throws c10::Error as the communicator
// does.
at::Tensor GatherContextRows(Communicator& communicator, const ContextShard& shard,
                             const at::Tensor& local);

// This rank's rows [t, ...] of the sum over the ranks of `whole` [T, ...]: the other way.
// Collective as well, and without gradient. Throws c10::Error as the communicator does.
at::Tensor ScatterContextRows(Communicator& communicator, const ContextShard& shard,
                              const at::Tensor& whole);

}  // namespace tandem::parallel

#endif  // TANDEM_COMMON_PARALLEL_CONTEXT_SHARD_H_
