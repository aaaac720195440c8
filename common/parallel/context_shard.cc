#include "common/parallel/context_shard.h"

#include <ATen/ATen.h>

#include <algorithm>

namespace tandem::parallel {
namespace {

// The first position of chunk 0 .. 2n; that of chunk 2n is the length.
int64_t ChunkBegin(int64_t length, int num_ranks, int64_t chunk) {
  const int64_t chunks = 2 * num_ranks, chunk_length = (length + chunks - 1) / chunks;
  return std::min(chunk * chunk_length, length);
}

// Rows of the whole batch, in the order in which the rank holds them.
at::Tensor RowsOf(const ContextShard& shard, int rank, at::Device device) {
  std::vector<int64_t> rows;
  int64_t offset = 0;
  for (const int64_t length : shard.lengths) {
    for (const int64_t chunk : {rank, 2 * shard.num_ranks - 1 - rank}) {
      const int64_t end = ChunkBegin(length, shard.num_ranks, chunk + 1);
      for (int64_t p = ChunkBegin(length, shard.num_ranks, chunk); p < end; ++p) {
        rows.push_back(offset + p);
      }
    }
    offset += length;
  }
  return at::tensor(rows, at::kLong).to(device);
}

}  // namespace

ChunkRows ContextShard::Chunks(int of_rank, int64_t sequence) const {
  const auto rows = [&](int64_t chunk) {
    return ChunkBegin(lengths[sequence], num_ranks, chunk + 1) -
           ChunkBegin(lengths[sequence], num_ranks, chunk);
  };
  return {.early = rows(of_rank), .late = rows(2 * num_ranks - 1 - of_rank)};
}

int64_t ContextShard::NumRows(int of_rank) const {
  int64_t rows = 0;
  for (size_t s = 0; s < lengths.size(); ++s) {
    rows += Chunks(of_rank, static_cast<int64_t>(s)).total();
  }
  return rows;
}

ContextShard MakeContextShard(const RaggedBatch& whole, int rank, int num_ranks) {
  TORCH_CHECK(rank >= 0 && rank < num_ranks, "context shard: there is no rank ", rank, " among ",
              num_ranks);
  ContextShard shard;
  shard.rank = rank;
  shard.num_ranks = num_ranks;
  shard.batch.offsets = {0};
  for (size_t s = 0; s + 1 < whole.offsets.size(); ++s) {
    shard.lengths.push_back(whole.offsets[s + 1] - whole.offsets[s]);
    shard.batch.offsets.push_back(shard.batch.offsets.back() +
                                  shard.Chunks(rank, static_cast<int64_t>(s)).total());
  }
  shard.rows = RowsOf(shard, rank, whole.tokens.device());
  shard.batch.tokens = whole.tokens.index_select(0, shard.rows);
  shard.batch.positions = whole.positions.index_select(0, shard.rows);
  shard.batch.positions_end = whole.positions_end;
  return shard;
}

at::Tensor GatherContextRows(Communicator& communicator, const ContextShard& shard,
                             const at::Tensor& local) {
  std::vector<int64_t> counts;
  for (int rank = 0; rank < shard.num_ranks; ++rank) counts.push_back(shard.NumRows(rank));
  TORCH_CHECK(communicator.size() == shard.num_ranks && local.size(0) == counts[shard.rank],
              "gather of context rows: ", local.size(0), " rows of one of ", communicator.size(),
              " ranks, not ", counts[shard.rank], " of ", shard.num_ranks);
  // As many as on the rank with the most: parts of a gather are of one size.
  std::vector<int64_t> sizes = local.sizes().vec();
  sizes[0] = *std::max_element(counts.begin(), counts.end());
  const at::Tensor padded = at::zeros(sizes, local.options());
  padded.narrow(0, 0, local.size(0)).copy_(local.detach());
  sizes.insert(sizes.begin(), shard.num_ranks);
  const at::Tensor all = at::empty(sizes, local.options());
  communicator.AllGather(all, padded);
  sizes.erase(sizes.begin());
  sizes[0] = 0;
  for (const int64_t count : counts) sizes[0] += count;
  at::Tensor whole = at::empty(sizes, local.options());
  for (int rank = 0; rank < shard.num_ranks; ++rank) {
    whole.index_copy_(0, RowsOf(shard, rank, local.device()), all[rank].narrow(0, 0, counts[rank]));
  }
  return whole;
}

}  // namespace tandem::parallel
