#include "common/kernels/cuda/cuda_kernels.h"
#include "common/kernels/cuda/launch.cuh"
#include "common/kernels/cuda/numbers.cuh"

namespace tandem::kernels {
namespace {

constexpr int kThreads = 256;
// A block computes tiles of outputs, and each thread 2 by 4 of them. kDepth numbers of each row and
// map are in shared memory at a time.
constexpr int kSide = 16;  // threads along a row of a tile, and along a column
constexpr int kRowsOfThread = 2, kOutsOfThread = 4;
constexpr int kTileRows = kSide * kRowsOfThread, kTileOuts = kSide * kOutsOfThread;
constexpr int kDepth = 32;
// Tiles of rows that a block computes one after the other, where maps have equally many rows.
constexpr int64_t kTilesOfBlock = 4;

__host__ __device__ inline int64_t OutBlocks(const DeviceGroupedLinearArgs& a) {
  return (a.out + kTileOuts - 1) / kTileOuts;
}

// Returns the number of blocks that share the rows of a map. The host does not know how many rows
// that are.
__host__ __device__ inline int64_t RowBlocks(const DeviceGroupedLinearArgs& a) {
  const int64_t rows = a.groups * kTileRows * kTilesOfBlock;
  return (a.rows + rows - 1) / rows;
}

// Copies `tile_rows` rows of a matrix [rows, in] from column `begin` on to shared memory; numbers
// outside of the matrix are 0.
template <typename Number>
__device__ void Load(const Number* matrix, int64_t rows, int64_t in, int begin, int tile_rows,
                     float (*tile)[kDepth + 1]) {
  for (int i = 4 * threadIdx.x; i < tile_rows * kDepth; i += 4 * kThreads) {
    const int row = i / kDepth, column = i % kDepth;
    Four four = {};
    if (row < rows && begin + column < in) {
      four = ReadFour(matrix + row * in, begin + column, static_cast<int>(in));
    }
    for (int j = 0; j < 4; ++j) tile[row][column + j] = four.x[j];
  }
}

// Runs OutBlocks * RowBlocks blocks per map. An output is one chain of multiply-adds over the
// columns, so its bits depend only on its row and its map.
template <typename Number>
__global__ void GroupedLinearKernel(DeviceGroupedLinearArgs a) {
  __shared__ float x_tile[kTileRows][kDepth + 1], w_tile[kTileOuts][kDepth + 1];
  const int64_t out_blocks = OutBlocks(a), row_blocks = RowBlocks(a);
  const int64_t group = blockIdx.x / (out_blocks * row_blocks);
  const int64_t first_out = blockIdx.x / row_blocks % out_blocks * kTileOuts;
  const int64_t begin = a.offsets[group], end = a.offsets[group + 1];
  const auto* x = static_cast<const Number*>(a.x);
  const auto* weights =
      static_cast<const Number*>(a.weights) + group * a.map_stride + first_out * a.in;
  const int column = threadIdx.x % kSide, line = threadIdx.x / kSide;
  for (int64_t first_row = begin + blockIdx.x % row_blocks * kTileRows; first_row < end;
       first_row += row_blocks * kTileRows) {
    float sums[kRowsOfThread][kOutsOfThread] = {};
    for (int depth = 0; depth < a.in; depth += kDepth) {
      Load(x + first_row * a.in, end - first_row, a.in, depth, kTileRows, x_tile);
      Load(weights, a.out - first_out, a.in, depth, kTileOuts, w_tile);
      __syncthreads();
      for (int k = 0; k < kDepth; ++k) {
        for (int i = 0; i < kRowsOfThread; ++i) {
          const float value = x_tile[line + kSide * i][k];
          for (int j = 0; j < kOutsOfThread; ++j) {
            sums[i][j] = fmaf(value, w_tile[column + kSide * j][k], sums[i][j]);
          }
        }
      }
      __syncthreads();
    }
    for (int i = 0; i < kRowsOfThread; ++i) {
      const int64_t row = first_row + line + kSide * i;
      for (int j = 0; j < kOutsOfThread; ++j) {
        const int64_t out = first_out + column + kSide * j;
        if (row < end && out < a.out) {
          Write(static_cast<Number*>(a.y), row * a.out + out, sums[i][j]);
        }
      }
    }
  }
}

}  // namespace

const char* GroupedLinearCuda(const DeviceGroupedLinearArgs& args, DeviceStream stream) {
  return LaunchKernel(
      args.bfloat16 ? GroupedLinearKernel<__nv_bfloat16> : GroupedLinearKernel<float>,
      args.groups * OutBlocks(args) * RowBlocks(args), kThreads, args, stream);
}

// The kernels of libtorch 2.11 for Hopper are the ones that ran.
bool HasGroupedMmCuda(int device) {
  int major = 0;
  return cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
         major == 9;
}

}  // namespace tandem::kernels
