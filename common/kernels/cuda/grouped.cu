#include <mma.h>

#include "common/kernels/cuda/cuda_kernels.h"
#include "common/kernels/cuda/launch.cuh"
#include "common/kernels/cuda/numbers.cuh"

namespace tandem::kernels {
namespace {

using nvcuda::wmma::accumulator;
using nvcuda::wmma::col_major;
using nvcuda::wmma::fragment;
using nvcuda::wmma::matrix_a;
using nvcuda::wmma::matrix_b;
using nvcuda::wmma::row_major;

constexpr int kThreads = 128;
// A block computes tiles of kTile by kTile outputs, the products of two operands of which kDepth
// numbers of each line are in shared memory at a time.
constexpr int kTile = 64, kDepth = 32;
// The tiles of rows that a block computes one after the other, where maps have equally many rows.
constexpr int64_t kTilesOfBlock = 2;

__host__ __device__ inline int64_t Tiles(int64_t lines) { return (lines + kTile - 1) / kTile; }

// The lines of two operands: outputs are the products of each line of `a` with each of `b`.
template <typename Number>
struct Lines {
  // Lines of float32 begin in different banks; the tensor cores want those of bfloat16 aligned.
  static constexpr int kStride = kDepth + (sizeof(Number) == 2 ? 8 : 1);
  Number a[kTile][kStride], b[kTile][kStride];
};

// A thread block's memory: operands, and when they have been multiplied the outputs.
template <typename Number>
union alignas(32) TileMemory {
  Lines<Number> lines;
  float outputs[kTile][kTile + 4];
};

// Copies the numbers of kTile rows of a matrix [rows, width], from column `begin` on; numbers
// outside of the matrix are 0.
template <typename Number, int kStride>
__device__ void LoadRows(const Number* matrix, int64_t rows, int64_t width, int64_t begin,
                         Number (*tile)[kStride]) {
  for (int i = 4 * threadIdx.x; i < kTile * kDepth; i += 4 * kThreads) {
    const int row = i / kDepth, column = i % kDepth;
    FourInMemory<Number> four = {};
    if (row < rows && begin + column < width) {
      four =
          CopyFour(matrix + row * width, static_cast<int>(begin) + column, static_cast<int>(width));
    }
    for (int j = 0; j < 4; ++j) tile[row][column + j] = four.x[j];
  }
}

// The same for kTile columns from `begin` on, of kDepth rows.
template <typename Number, int kStride>
__device__ void LoadColumns(const Number* matrix, int64_t rows, int64_t width, int64_t begin,
                            Number (*tile)[kStride]) {
  for (int i = 4 * threadIdx.x; i < kTile * kDepth; i += 4 * kThreads) {
    const int row = i / kTile, column = i % kTile;
    FourInMemory<Number> four = {};
    if (row < rows && begin + column < width) {
      four =
          CopyFour(matrix + row * width, static_cast<int>(begin) + column, static_cast<int>(width));
    }
    for (int j = 0; j < 4; ++j) tile[column + j][row] = four.x[j];
  }
}

// The outputs of a tile that a thread or a warp adds up. Lines of `a` from `lines` on are 0, and
// may be left out.
template <typename Number>
class Sums;

// Each thread has 8 by 4 outputs, and an output is one chain of multiply-adds.
template <>
class Sums<float> {
 public:
  __device__ void Add(const Lines<float>& operands, int64_t lines) {
    for (int k = 0; k < kDepth; ++k) {
      for (int i = 0; i < kLines; ++i) {
        if (kRows * i >= lines) continue;
        const float value = operands.a[Row(i)][k];
        for (int j = 0; j < kOuts; ++j) {
          sums_[i][j] = fmaf(value, operands.b[Column(j)][k], sums_[i][j]);
        }
      }
    }
  }

  __device__ void Store(float (*outputs)[kTile + 4]) const {
    for (int i = 0; i < kLines; ++i) {
      for (int j = 0; j < kOuts; ++j) outputs[Row(i)][Column(j)] = sums_[i][j];
    }
  }

 private:
  static constexpr int kColumns = 16, kRows = kThreads / kColumns;
  static constexpr int kLines = kTile / kRows, kOuts = kTile / kColumns;

  static __device__ int Row(int i) { return threadIdx.x / kColumns + kRows * i; }
  static __device__ int Column(int j) { return threadIdx.x % kColumns + kColumns * j; }

  float sums_[kLines][kOuts] = {};
};

// Each warp has 32 by 32 outputs, which its tensor core adds up in pieces of 16 by 16.
template <>
class Sums<__nv_bfloat16> {
 public:
  __device__ Sums() {
    for (auto& row : sums_) {
      for (auto& sum : row) nvcuda::wmma::fill_fragment(sum, 0.0f);
    }
  }

  __device__ void Add(const Lines<__nv_bfloat16>& operands, int64_t lines) {
    constexpr int kStride = Lines<__nv_bfloat16>::kStride;
    if (Row(0) >= lines) return;
    for (int k = 0; k < kDepth; k += kSide) {
      fragment<matrix_b, kSide, kSide, kSide, __nv_bfloat16, col_major> b[kPieces];
      for (int j = 0; j < kPieces; ++j) {
        nvcuda::wmma::load_matrix_sync(b[j], &operands.b[Column(j)][k], kStride);
      }
      for (int i = 0; i < kPieces; ++i) {
        fragment<matrix_a, kSide, kSide, kSide, __nv_bfloat16, row_major> a;
        nvcuda::wmma::load_matrix_sync(a, &operands.a[Row(i)][k], kStride);
        for (int j = 0; j < kPieces; ++j) {
          nvcuda::wmma::mma_sync(sums_[i][j], a, b[j], sums_[i][j]);
        }
      }
    }
  }

  __device__ void Store(float (*outputs)[kTile + 4]) const {
    for (int i = 0; i < kPieces; ++i) {
      for (int j = 0; j < kPieces; ++j) {
        nvcuda::wmma::store_matrix_sync(&outputs[Row(i)][Column(j)], sums_[i][j], kTile + 4,
                                        nvcuda::wmma::mem_row_major);
      }
    }
  }

 private:
  static constexpr int kSide = 16, kPieces = 2, kWarpSide = kSide * kPieces;

  static __device__ int Row(int i) { return threadIdx.x / 64 * kWarpSide + kSide * i; }
  static __device__ int Column(int j) { return threadIdx.x / 32 % 2 * kWarpSide + kSide * j; }

  fragment<accumulator, kSide, kSide, kSide, float> sums_[kPieces][kPieces];
};

// Adds load(depth) for every kDepth of `depth`, and calls write(line of a, line of b, output) for
// the outputs of the tile.
template <typename Number, typename Load, typename Write>
__device__ void ComputeTile(TileMemory<Number>& memory, int64_t depth, int64_t lines,
                            const Load& load, const Write& write) {
  Sums<Number> sums;
  for (int64_t begin = 0; begin < depth; begin += kDepth) {
    load(begin);
    __syncthreads();
    sums.Add(memory.lines, lines);
    __syncthreads();
  }
  sums.Store(memory.outputs);
  __syncthreads();
  for (int i = threadIdx.x; i < kTile * kTile; i += kThreads) {
    write(i / kTile, i % kTile, memory.outputs[i / kTile][i % kTile]);
  }
  __syncthreads();
}

// Returns the number of blocks that share the rows of a map. The host does not know how many rows
// that are.
__host__ __device__ inline int64_t RowBlocks(const DeviceGroupedLinearArgs& a) {
  const int64_t rows = a.groups * kTile * kTilesOfBlock;
  return (a.rows + rows - 1) / rows;
}

// Runs Tiles(out) * RowBlocks blocks per map. The sum of an output is over the columns in ascending
// order, so its bits depend only on its row and its map.
template <typename Number>
__global__ void GroupedLinearKernel(DeviceGroupedLinearArgs a) {
  __shared__ TileMemory<Number> memory;
  const int64_t out_tiles = Tiles(a.out), row_blocks = RowBlocks(a);
  const int64_t group = blockIdx.x / (out_tiles * row_blocks);
  const int64_t first_out = blockIdx.x / row_blocks % out_tiles * kTile;
  const int64_t begin = a.offsets[group], end = a.offsets[group + 1];
  const auto* weights = static_cast<const Number*>(a.weights) + group * a.map_stride;
  for (int64_t first_row = begin + blockIdx.x % row_blocks * kTile; first_row < end;
       first_row += row_blocks * kTile) {
    const auto* x = static_cast<const Number*>(a.x) + first_row * a.in;
    const auto load = [&](int64_t depth) {
      LoadRows(x, end - first_row, a.in, depth, memory.lines.a);
      if (a.transposed) {
        LoadColumns(weights + depth * a.out, a.in - depth, a.out, first_out, memory.lines.b);
      } else {
        LoadRows(weights + first_out * a.in, a.out - first_out, a.in, depth, memory.lines.b);
      }
    };
    ComputeTile(memory, a.in, end - first_row, load, [&](int row, int out, float sum) {
      if (first_row + row >= end || first_out + out >= a.out) return;
      Write(static_cast<Number*>(a.y), (first_row + row) * a.out + first_out + out, sum);
    });
  }
}

// Runs Tiles(out) * Tiles(in) blocks per map.
template <typename Number>
__global__ void GroupedGradientKernel(DeviceGroupedGradientArgs a) {
  __shared__ TileMemory<Number> memory;
  const int64_t out_tiles = Tiles(a.out), in_tiles = Tiles(a.in);
  const int64_t group = blockIdx.x / (out_tiles * in_tiles);
  const int64_t first_out = blockIdx.x / in_tiles % out_tiles * kTile;
  const int64_t first_in = blockIdx.x % in_tiles * kTile;
  const int64_t begin = a.offsets[group], rows = a.offsets[group + 1] - begin;
  if (rows == 0 && a.accumulate) return;
  const auto* dy = static_cast<const Number*>(a.dy) + begin * a.out;
  const auto* x = static_cast<const Number*>(a.x) + begin * a.in;
  const auto load = [&](int64_t row) {
    LoadColumns(dy + row * a.out, rows - row, a.out, first_out, memory.lines.a);
    LoadColumns(x + row * a.in, rows - row, a.in, first_in, memory.lines.b);
  };
  float* gradient = a.gradients + group * a.map_stride;
  ComputeTile(memory, rows, a.out - first_out, load, [&](int out, int in, float sum) {
    if (first_out + out >= a.out || first_in + in >= a.in) return;
    float& total = gradient[(first_out + out) * a.in + first_in + in];
    total = a.accumulate ? total + sum : sum;
  });
}

}  // namespace

const char* GroupedLinearCuda(const DeviceGroupedLinearArgs& args, DeviceStream stream) {
  return LaunchKernel(
      args.bfloat16 ? GroupedLinearKernel<__nv_bfloat16> : GroupedLinearKernel<float>,
      args.groups * Tiles(args.out) * RowBlocks(args), kThreads, args, stream);
}

const char* GroupedGradientCuda(const DeviceGroupedGradientArgs& args, DeviceStream stream) {
  return LaunchKernel(
      args.bfloat16 ? GroupedGradientKernel<__nv_bfloat16> : GroupedGradientKernel<float>,
      args.groups * Tiles(args.out) * Tiles(args.in), kThreads, args, stream);
}

// The kernels of libtorch 2.11 for Hopper are the ones that ran.
bool HasGroupedMmCuda(int device) {
  int major = 0;
  return cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
         major == 9;
}

}  // namespace tandem::kernels
