#include "common/kernels/cuda/cuda_kernels.h"
#include "common/kernels/cuda/launch.cuh"
#include "common/kernels/cuda/numbers.cuh"

namespace tandem::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kQueries = kPagedQueries, kSplit = kPagedSplitKeys, kMaxDim = kPagedMaxHeadDim;
constexpr int kBlock = kPagedBlockTokens;
// Blocks that a multiprocessor holds at a time, so that some compute while others wait for memory:
// it bounds the registers of a thread.
constexpr int kBlocks = 3;
// Neighbouring threads that divide the columns of a key.
constexpr int kLanes = 4;
// Queries whose sums the groups of threads exchange at a time.
constexpr int kExchanged = 4;
static_assert(kThreads / 32 == kQueries, "a warp takes the softmax of a query");
static_assert(kExchanged * kMaxDim <= 4 * kThreads, "a thread has one Four of the exchanged sums");

// Attention of a query to some keys: the highest score, the sum of exp(score - highest), and the
// sum of the values with these weights. The sum over no keys is 0.
struct Partial {
  float highest, sum;
  Four output;

  // Adds the result of other keys. The multiply-adds are explicit, so that every kernel that folds
  // has the same bits.
  __device__ void Fold(const Partial& other) {
    if (sum == 0) {
      *this = other;
      return;
    }
    const float top = fmaxf(highest, other.highest);
    const float mine = expf(highest - top), theirs = expf(other.highest - top);
    sum = fmaf(sum, mine, other.sum * theirs);
    for (int j = 0; j < 4; ++j) {
      output.x[j] = fmaf(output.x[j], mine, other.output.x[j] * theirs);
    }
    highest = top;
  }

  // Writes the attention of a head of a row, its columns from `column` on.
  __device__ void WriteOutput(const DevicePagedAttentionArgs& a, int64_t row, int64_t head,
                              int column) const {
    for (int j = 0; j < 4 && column + j < a.head_dim; ++j) {
      Write(a.outputs, (row * a.heads + head) * a.head_dim + column + j, output.x[j] / sum,
            a.bfloat16);
    }
  }
};

__device__ int FirstKeyOf(int position, int64_t window) {
  return position < window ? 0 : static_cast<int>(position - window + 1);
}

__device__ int FoursOf(int64_t head_dim) { return (static_cast<int>(head_dim) + 3) / 4; }

// Returns the units of work of an item for a key/value head.
__host__ __device__ int HeadTiles(const DevicePagedAttentionArgs& a) {
  return static_cast<int>((a.heads / a.kv_heads + kQueries - 1) / kQueries);
}

// Runs one block per row.
template <typename Number>
__global__ void CacheWriteKernel(DeviceCacheWriteArgs a) {
  const int64_t row = blockIdx.x, width = a.kv_heads * a.head_dim;
  if (a.blocks[row] < 0) return;
  for (int64_t i = threadIdx.x; i < width; i += kThreads) {
    const int64_t head = i / a.head_dim, d = i % a.head_dim;
    const int64_t to =
        ((a.blocks[row] * a.kv_heads + head) * kBlock + a.places[row]) * a.head_dim + d;
    Write(static_cast<Number*>(a.key_cache), to,
          Read(a.keys, row * a.key_row_stride + i, a.bfloat16));
    Write(static_cast<Number*>(a.value_cache), to,
          Read(a.values, row * a.value_row_stride + i, a.bfloat16));
  }
}

// Memory that the threads of a block of PagedAttentionKernel share.
struct Shared {
  Four queries[kQueries * kMaxDim / 4];
  Four scores[kSplit][kQueries / 4];  // then the weights exp(score - highest)
  float highest[kQueries], sums[kQueries];
  Four exchanged[kExchanged * kThreads];

  __device__ float& score(int key, int query) { return scores[key][query / 4].x[query % 4]; }
};

// A unit of work of a block: the queries of an item's rows and of up to kQueries heads, one after
// the other. Keys are counted from the first of a split.
template <typename Number>
struct Tile {
  DevicePagedItem item;
  int first_head, heads;  // of the queries; query i is of the row i / heads
  int kv_head, kv_heads;
  int count;  // queries
  int dim, fours;

  __device__ Tile(const DevicePagedAttentionArgs& a, int unit)
      : kv_heads(static_cast<int>(a.kv_heads)),
        dim(static_cast<int>(a.head_dim)),
        fours(FoursOf(a.head_dim)) {
    const int group = static_cast<int>(a.heads) / kv_heads;
    const int tiles = HeadTiles(a), tile = unit % tiles;
    kv_head = unit / tiles % kv_heads;
    item = a.items[unit / tiles / kv_heads];
    first_head = kv_head * group + tile * kQueries;
    heads = min(group - tile * kQueries, kQueries);
    count = item.rows * heads;
  }

  __device__ int Position(int query) const { return item.position + query / heads; }

  // Returns where the cache has the key or value at a position.
  __device__ const Number* At(const DevicePagedAttentionArgs& a, const void* cache,
                              int position) const {
    const int64_t block = a.block_table[item.sequence * a.table_width + position / kBlock];
    return static_cast<const Number*>(cache) +
           ((block * kv_heads + kv_head) * kBlock + position % kBlock) * dim;
  }

  __device__ void ReadQueries(const DevicePagedAttentionArgs& a, Shared& shared) const {
    for (int i = threadIdx.x; i < count * fours; i += kThreads) {
      const int query = i / fours;
      const int64_t begin =
          (item.row + query / heads) * a.row_stride + (first_head + query % heads) * dim;
      for (int j = 0; j < 4; ++j) {
        const int d = i % fours * 4 + j;
        shared.queries[i].x[j] = d < dim ? Read(a.queries, begin + d, a.bfloat16) : 0.0f;
      }
    }
  }

  // Computes the scores of the keys [begin, end) of the split that begins at `start`. kLanes
  // threads take a key.
  __device__ void Score(const DevicePagedAttentionArgs& a, int start, int begin, int end,
                        Shared& shared) const {
    constexpr int kWarpKeys = 32 / kLanes;
    const int part = threadIdx.x % kLanes;
    for (int first = threadIdx.x / 32 * kWarpKeys; first < kSplit; first += kThreads / kLanes) {
      if (first + kWarpKeys <= begin || first >= end) continue;  // none of the warp's keys
      const int key = first + threadIdx.x % 32 / kLanes;
      float dots[kQueries] = {};
      if (key >= begin && key < end) {
        const Number* const k = At(a, a.key_cache, start + key);
        for (int c = part; c < fours; c += kLanes) {
          const Four numbers = ReadFour(k, 4 * c, dim);
          for (int i = 0; i < kQueries; ++i) {
            if (i >= count) continue;
            const Four query = shared.queries[i * fours + c];
            for (int j = 0; j < 4; ++j) dots[i] = fmaf(query.x[j], numbers.x[j], dots[i]);
          }
        }
      }
      for (int i = 0; i < kQueries; ++i) {
        if (i >= count) continue;
        for (int lanes = 1; lanes < kLanes; lanes *= 2) {
          dots[i] += __shfl_xor_sync(0xffffffffu, dots[i], lanes);
        }
        float score = dots[i] * a.scale;
        if (a.soft_cap > 0) score = a.soft_cap * tanhf(score / a.soft_cap);
        if (part == 0) shared.score(key, i) = score;
      }
    }
  }

  // Replaces the scores by weights, 0 for keys that a query does not see. A warp takes a query.
  __device__ void Weigh(const DevicePagedAttentionArgs& a, int start, Shared& shared) const {
    const int query = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (query >= count) return;
    const int last = Position(query) - start;
    const int first = FirstKeyOf(Position(query), a.window) - start;
    float top = -INFINITY, sum = 0;
    for (int key = lane; key < kSplit; key += 32) {
      if (key >= first && key <= last) top = fmaxf(top, shared.score(key, query));
    }
    for (int lanes = 16; lanes > 0; lanes /= 2) {
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, lanes));
    }
    for (int key = lane; key < kSplit; key += 32) {
      const bool is_seen = key >= first && key <= last;
      const float weight = is_seen ? expf(shared.score(key, query) - top) : 0.0f;
      shared.score(key, query) = weight;
      sum += weight;
    }
    for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
    if (lane == 0) {
      shared.highest[query] = top;
      shared.sums[query] = sum;
    }
  }

  // Adds the weighted values of the keys group, group + groups, … of [begin, end), four columns.
  __device__ void SumValues(const DevicePagedAttentionArgs& a, int start, int begin, int end,
                            int group, int groups, int column, Shared& shared,
                            Four (&outputs)[kQueries]) const {
    for (int key = group; key < end; key += groups) {
      if (key < begin) continue;
      const Four numbers = ReadFour(At(a, a.value_cache, start + key), 4 * column, dim);
      for (int i = 0; i < kQueries; ++i) {
        if (i >= count) continue;
        const float weight = shared.score(key, i);
        // A value that a query does not see may be no number.
        if (weight == 0) continue;
        for (int j = 0; j < 4; ++j) {
          outputs[i].x[j] = fmaf(weight, numbers.x[j], outputs[i].x[j]);
        }
      }
    }
  }
};

// Attends for one unit: the threads of the block read every key and value once for all queries.
// Groups of threads take the values in turn, a Four of columns a thread, and exchange their sums.
template <typename Number>
__device__ void Attend(const DevicePagedAttentionArgs& a, const Tile<Number>& tile,
                       Shared& shared) {
  const DevicePagedItem& item = tile.item;
  const int count = tile.count, fours = tile.fours;
  const int first_key = FirstKeyOf(item.position, a.window), end_key = item.position + item.rows;
  const int groups = kThreads / fours, group = threadIdx.x / fours, column = threadIdx.x % fours;
  tile.ReadQueries(a, shared);
  __syncthreads();
  Partial results[kQueries / kExchanged] = {};
  for (int split = item.first_split; split < item.end_split; ++split) {
    const int start = split * kSplit;
    const int begin = max(first_key - start, 0), end = min(end_key - start, kSplit);
    tile.Score(a, start, begin, end, shared);
    __syncthreads();
    tile.Weigh(a, start, shared);
    __syncthreads();
    Four outputs[kQueries] = {};
    if (group < groups)
      tile.SumValues(a, start, begin, end, group, groups, column, shared, outputs);
    for (int round = 0; round < kQueries / kExchanged; ++round) {
      const int first = round * kExchanged, query = first + group;
      if (first >= count) continue;
      for (int i = 0; i < kExchanged; ++i) {
        if (group >= groups || first + i >= count) continue;
        shared.exchanged[(group * kExchanged + i) * fours + column] = outputs[first + i];
      }
      __syncthreads();
      const int position = tile.Position(query);
      if (group < kExchanged && query < count && position >= start &&
          FirstKeyOf(position, a.window) < start + kSplit) {
        Partial partial = {shared.highest[query], shared.sums[query], {}};
        for (int g = 0; g < groups; ++g) {
          const Four sum = shared.exchanged[g * kExchanged * fours + threadIdx.x];
          for (int j = 0; j < 4; ++j) partial.output.x[j] += sum.x[j];
        }
        results[round].Fold(partial);
      }
      __syncthreads();
    }
  }
  for (int round = 0; round < kQueries / kExchanged; ++round) {
    const int query = round * kExchanged + group;
    if (group >= kExchanged || query >= count) continue;
    const int place = query / tile.heads, head = tile.first_head + query % tile.heads;
    if (item.partial < 0) {
      results[round].WriteOutput(a, item.row + place, head, 4 * column);
      continue;
    }
    const int64_t to = (item.partial * a.rows_per_item + place) * a.heads + head;
    if (column == 0) {
      a.highest[to] = results[round].highest;
      a.sums[to] = results[round].sum;
    }
    reinterpret_cast<Four*>(a.partial_outputs)[to * fours + column] = results[round].output;
  }
}

// A block takes the units blockIdx.x, blockIdx.x + gridDim.x, … of an item, a key/value head and
// kQueries of the query heads that share it.
template <typename Number>
__global__ void __launch_bounds__(kThreads, kBlocks)
    PagedAttentionKernel(DevicePagedAttentionArgs a) {
  __shared__ Shared shared;
  const int items = a.counts == nullptr ? static_cast<int>(a.num_items) : a.counts[0];
  const int units = items * static_cast<int>(a.kv_heads) * HeadTiles(a);
  // A unit reads shared memory before its last barrier alone, so the next one may write there.
  for (int unit = blockIdx.x; unit < units; unit += gridDim.x) {
    Attend(a, Tile<Number>(a, unit), shared);
  }
}

// Returns the blocks that the Fours of columns of a row fill.
__host__ __device__ int FoldBlocks(const DevicePagedAttentionArgs& a) {
  return static_cast<int>((a.heads * ((a.head_dim + 3) / 4) + kThreads - 1) / kThreads);
}

// A block takes the units blockIdx.x, blockIdx.x + gridDim.x, … of a row and kThreads of its Fours.
__global__ void FoldPartialsKernel(DevicePagedAttentionArgs a) {
  const int fours = FoursOf(a.head_dim), blocks = FoldBlocks(a);
  const int rows = a.counts == nullptr ? static_cast<int>(a.num_partial_rows) : a.counts[1];
  for (int unit = blockIdx.x; unit < rows * blocks; unit += gridDim.x) {
    const DevicePartialRow row = a.partial_rows[unit / blocks];
    const int column = unit % blocks * kThreads + threadIdx.x;
    if (column >= static_cast<int>(a.heads) * fours) continue;
    const int64_t head = column / fours;
    Partial result = {};
    const int end = row.position / kSplit + 1;
    for (int split = FirstKeyOf(row.position, a.window) / kSplit; split < end; ++split) {
      const int64_t from = ((row.base + split) * a.rows_per_item + row.place) * a.heads + head;
      const auto* const outputs = reinterpret_cast<const Four*>(a.partial_outputs) + from * fours;
      result.Fold({a.highest[from], a.sums[from], outputs[column % fours]});
    }
    result.WriteOutput(a, row.row, head, column % fours * 4);
  }
}

// Returns the blocks of a launch for at most `units`: one for each, or where the device alone knows
// how many there are, as `counts` says, at most those that it runs at a time, and as many again.
int64_t BlocksFor(int64_t units, const int32_t* counts) {
  if (counts == nullptr) return units;
  int device = 0, multiprocessors = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  const int64_t most = int64_t{2} * kBlocks * multiprocessors;
  return units < most ? units : most;
}

}  // namespace

const char* CacheWriteCuda(const DeviceCacheWriteArgs& args, DeviceStream stream) {
  return LaunchKernel(
      args.cache_bfloat16 ? CacheWriteKernel<__nv_bfloat16> : CacheWriteKernel<float>, args.rows,
      kThreads, args, stream);
}

const char* PagedAttentionCuda(const DevicePagedAttentionArgs& args, DeviceStream stream) {
  const int64_t units = args.num_items * args.kv_heads * HeadTiles(args);
  if (units > INT32_MAX) return "it has too many rows";
  return LaunchKernel(
      args.cache_bfloat16 ? PagedAttentionKernel<__nv_bfloat16> : PagedAttentionKernel<float>,
      BlocksFor(units, args.counts), kThreads, args, stream);
}

const char* FoldPartialsCuda(const DevicePagedAttentionArgs& args, DeviceStream stream) {
  return LaunchKernel(FoldPartialsKernel,
                      BlocksFor(args.num_partial_rows * FoldBlocks(args), args.counts), kThreads,
                      args, stream);
}

}  // namespace tandem::kernels
