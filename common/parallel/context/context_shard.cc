#include "common/parallel/context/context_shard.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <numeric>

#include "common/tensor/aten/device_copies.h"

namespace tandem::parallel {
namespace {

// Returns the first position of a chunk in [0, 2n]; for chunk 2n, the length.
int64_t ChunkBegin(int64_t length, int num_ranks, int64_t chunk) {
  const int64_t chunks = 2 * num_ranks, chunk_length = (length + chunks - 1) / chunks;
  return std::min(chunk * chunk_length, length);
}

// Calls fn(offset, position) for each token that a rank holds, in its order; `offset` is the first
// row of the token's sequence in the whole batch.
template <typename Function>
void ForEachToken(const ContextShard& shard, int rank, const Function& fn) {
  int64_t offset = 0;
  for (const int64_t length : shard.lengths) {
    for (const int64_t chunk : {rank, 2 * shard.num_ranks - 1 - rank}) {
      const int64_t end = ChunkBegin(length, shard.num_ranks, chunk + 1);
      for (int64_t p = ChunkBegin(length, shard.num_ranks, chunk); p < end; ++p) fn(offset, p);
    }
    offset += length;
  }
}

// Returns the rows of the whole batch that a rank holds, in its order.
at::Tensor RowsOf(const ContextShard& shard, int rank, at::Device device) {
  std::vector<int64_t> rows;
  ForEachToken(shard, rank, [&](int64_t offset, int64_t p) { rows.push_back(offset + p); });
  return CopyToDevice(rows, device);
}

// Returns the images of a batch of `tokens` tokens for the rank that holds `rows` of them. The rank
// has all pixels, and the rows of images among its own.
BatchImages OwnImages(BatchImages images, const at::Tensor& rows, int64_t tokens) {
  at::Tensor own_row = at::full({tokens}, -1, rows.options());
  own_row.index_copy_(0, rows, at::arange(rows.numel(), rows.options()));
  const at::Tensor placed = own_row.index_select(0, images.token_rows);
  const at::Tensor own = placed.ge(0).nonzero().squeeze(1);
  images.token_rows = placed.index_select(0, own);
  images.tower_rows = images.tower_rows.index_select(0, own);
  images.rotary_positions = images.rotary_positions.index_select(1, rows);
  return images;
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

at::Tensor ContextShard::Positions(int of_rank) const {
  std::vector<int64_t> positions;
  ForEachToken(*this, of_rank, [&](int64_t, int64_t p) { positions.push_back(p); });
  return CopyToDevice(positions, rows.device());
}

ContextShard MakeContextShard(const RaggedBatch& whole, int rank, int num_ranks) {
  TORCH_CHECK(rank >= 0 && rank < num_ranks, "context shard: there is no rank ", rank, " among ",
              num_ranks);
  TORCH_CHECK(whole.tables.prefixes == nullptr, "context shard: sequences share prefixes");
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
  shard.batch.routing = whole.routing;
  if (whole.routing.given.defined()) {
    shard.batch.routing.given = whole.routing.given.index_select(0, shard.rows);
  }
  if (whole.images.rotary_positions.defined()) {
    shard.batch.images = OwnImages(whole.images, shard.rows, whole.num_tokens());
  }
  return shard;
}

namespace {

// Returns the number of rows of every rank.
std::vector<int64_t> RowCounts(const ranks::Communicator& communicator, const ContextShard& shard) {
  TORCH_CHECK(communicator.size() == shard.num_ranks, "a batch of ", shard.num_ranks,
              " context ranks among ", communicator.size());
  std::vector<int64_t> counts;
  for (int rank = 0; rank < shard.num_ranks; ++rank) counts.push_back(shard.NumRows(rank));
  return counts;
}

// Returns zeros [n, most rows of a rank, ...]: the shards of a collective have one size.
at::Tensor PaddedShards(const std::vector<int64_t>& counts, const at::Tensor& like) {
  std::vector<int64_t> sizes = like.sizes().vec();
  sizes[0] = *std::max_element(counts.begin(), counts.end());
  sizes.insert(sizes.begin(), static_cast<int64_t>(counts.size()));
  return at::zeros(sizes, like.options().requires_grad(false));
}

}  // namespace

at::Tensor GatherContextRows(ranks::Communicator& communicator, const ContextShard& shard,
                             const at::Tensor& local) {
  const std::vector<int64_t> counts = RowCounts(communicator, shard);
  TORCH_CHECK(local.size(0) == counts[shard.rank], "gather of ", local.size(0),
              " context rows, not ", counts[shard.rank]);
  const at::Tensor all = PaddedShards(counts, local);
  all[shard.rank].narrow(0, 0, local.size(0)).copy_(local.detach());
  communicator.AllGather(all, all[shard.rank]);
  std::vector<int64_t> sizes = local.sizes().vec();
  sizes[0] = std::accumulate(counts.begin(), counts.end(), int64_t{0});
  at::Tensor whole = at::empty(sizes, all.options());
  for (int rank = 0; rank < shard.num_ranks; ++rank) {
    whole.index_copy_(0, RowsOf(shard, rank, local.device()), all[rank].narrow(0, 0, counts[rank]));
  }
  return whole;
}

at::Tensor ScatterContextRows(ranks::Communicator& communicator, const ContextShard& shard,
                              const at::Tensor& whole) {
  const std::vector<int64_t> counts = RowCounts(communicator, shard);
  const at::Tensor shards = PaddedShards(counts, whole);
  for (int rank = 0; rank < shard.num_ranks; ++rank) {
    shards[rank]
        .narrow(0, 0, counts[rank])
        .copy_(whole.detach().index_select(0, RowsOf(shard, rank, whole.device())));
  }
  communicator.ReduceScatter(shards[shard.rank], shards);
  return shards[shard.rank].narrow(0, 0, counts[shard.rank]);
}

}  // namespace tandem::parallel
