// Kernels on a GPU: raw device pointers and a stream, no header of torch or of the GPU's toolkit.
// The sibling of CpuKernels (cpu/cpu_kernels.h): one table for each type of device, which
// ops::DeviceKernelsOf finds by a tensor's device. docs/internals/kernels.md says which kernel runs
// where.
#ifndef TANDEM_COMMON_KERNELS_DEVICE_KERNELS_H_
#define TANDEM_COMMON_KERNELS_DEVICE_KERNELS_H_

#include <cstdint>

#include "common/kernels/gate_activation.h"

namespace tandem::kernels {

// A stream as the toolkit has it (cudaStream_t): c10::Stream::native_handle.
using DeviceStream = void*;

// RMSNorm: y = x / sqrt(mean(x^2) + eps) (weight + offset) for each vector of `width` numbers; sums
// and products in float32.
struct DeviceRmsNormArgs {
  const void* x;  // the head h of row r begins at x + r row_stride + h head_stride, in numbers
  int64_t row_stride;
  int64_t head_stride;
  const void* weight;  // [width]
  void* y;             // [rows, heads, width]
  int64_t rows;
  int64_t heads;
  int64_t width;
  float eps;
  float offset;
  bool bfloat16;  // x, weight and y; else float32
};

// The rotation of the first `rotated` columns of every head, as ops::RotaryEmbedding; in float32.
struct DeviceRotaryArgs {
  const void* x;  // row r begins at x + r row_stride, in numbers; heads are contiguous
  int64_t row_stride;
  const float* cos;  // [rows, rotated / 2]
  const float* sin;
  void* y;  // [rows, heads, head_dim]
  int64_t rows;
  int64_t heads;
  int64_t head_dim;
  int64_t rotated;
  bool bfloat16;  // x and y; else float32
};

// y = activation(gate) up, for rows of gates and ups side by side; in float32.
struct DeviceGatedArgs {
  const void* gate_up;  // row r begins at gate_up + r row_stride, in numbers: [2 width]
  int64_t row_stride;
  void* y;  // [rows, width]
  int64_t rows;
  int64_t width;
  GateActivation activation;
  bool bfloat16;  // gate_up and y; else float32
};

// Linear maps of one shape that have rows of their own, as the experts of a layer: the rows from
// offsets[g] on to offsets[g + 1] are multiplied by map g. The host does not know the offsets. Sums
// are float32 in ascending order of the columns, of bfloat16 on tensor cores: the bits of an output
// depend only on its row and its map.
struct DeviceGroupedLinearArgs {
  const void* x;           // [rows, in], contiguous
  const void* weights;     // map g [out, in] begins at weights + g map_stride, in numbers
  int64_t map_stride;      // a multiple of four, as is the place of `weights`
  const int32_t* offsets;  // [groups + 1], ascending
  void* y;                 // [rows, out]; rows of no group are not written
  int64_t rows;
  int64_t groups;
  int64_t in;
  int64_t out;
  bool transposed;  // maps lie as [in, out]
  bool bfloat16;    // x, weights and y; else float32
};

// The gradients of such maps: that of map g is the sum over its rows of dy^T x, in float32 and in
// ascending order of the rows.
struct DeviceGroupedGradientArgs {
  const void* dy;          // [rows, out], contiguous
  const void* x;           // [rows, in], contiguous
  const int32_t* offsets;  // [groups + 1], ascending
  float* gradients;        // that of map g [out, in] begins at gradients + g map_stride
  int64_t map_stride;
  int64_t groups;
  int64_t in;
  int64_t out;
  bool
      accumulate;  // adds to what `gradients` has; else overwrites it, for maps without rows with 0
  bool bfloat16;   // dy and x; else float32
};

// A paged cache of keys or values: [blocks, kv_heads, kPagedBlockTokens, head_dim], contiguous.
inline constexpr int64_t kPagedBlockTokens = 64;

// Writes keys and values of rows into the blocks of a cache, rounded to its type. A row whose block
// is negative is left out.
struct DeviceCacheWriteArgs {
  const void* keys;  // row r begins at keys + r key_row_stride, in numbers; heads are contiguous
  int64_t key_row_stride;
  const void* values;
  int64_t value_row_stride;
  const int64_t* blocks;  // [rows]: the block of each row, and the place in it
  const int64_t* places;
  void* key_cache;
  void* value_cache;
  int64_t rows;
  int64_t kv_heads;
  int64_t head_dim;
  bool bfloat16;        // keys and values; else float32
  bool cache_bfloat16;  // key_cache and value_cache; else float32
};

// Attention of rows to a paged cache. The keys of a sequence are divided at the positions that are
// multiples of kPagedSplitKeys. A row attends to each split by itself, and the results are folded
// in ascending order: its bits depend on its own queries and keys alone, not on the other rows.
inline constexpr int64_t kPagedSplitKeys = 128;
// Query vectors of one key/value head that share each read of a key.
inline constexpr int64_t kPagedQueries = 8;
inline constexpr int64_t kPagedMaxHeadDim = 256;

// Returns the most consecutive rows of a sequence in one item, for `group` query heads that share a
// key/value head.
inline int64_t PagedRowsPerItem(int64_t group) {
  return group < kPagedQueries ? kPagedQueries / group : 1;
}

// Some consecutive rows of a sequence, and the splits that they attend to.
struct DevicePagedItem {
  int32_t sequence;  // of the block table
  int32_t row;       // the first of its rows in the batch, and its position in the sequence
  int32_t position;
  int32_t rows;  // at most PagedRowsPerItem
  int32_t first_split;
  int32_t end_split;
  // The place of the results of a single split among the partial ones; -1: the item has all splits
  // of its rows, and writes their output.
  int32_t partial;
};

// A row with partial results. Those of split k are of the item whose `partial` is base + k.
struct DevicePartialRow {
  int32_t row;       // of the batch
  int32_t position;  // in its sequence
  int32_t place;     // among the rows of the items
  int32_t base;
};

struct DevicePagedAttentionArgs {
  const void* queries;  // row r begins at queries + r row_stride, in numbers; heads are contiguous
  int64_t row_stride;
  const void* key_cache;
  const void* value_cache;
  const int32_t* block_table;  // [sequences, table_width]
  int64_t table_width;
  const DevicePagedItem* items;
  int64_t num_items;
  const DevicePartialRow* partial_rows;
  int64_t num_partial_rows;
  // [2] on the device: how many of num_items and of num_partial_rows there are, for a launch that a
  // graph repeats with other rows; nullptr: all.
  const int32_t* counts = nullptr;
  int64_t rows_per_item;  // PagedRowsPerItem
  // For each partial item, each of rows_per_item rows and each head: the highest score, the sum
  // of exp(score - highest), and the weighted sum of the values, padded to a multiple of four.
  float* highest;
  float* sums;
  float* partial_outputs;
  void* outputs;  // [T, heads, head_dim]
  int64_t heads;
  int64_t kv_heads;
  int64_t head_dim;  // at most kPagedMaxHeadDim
  int64_t window;    // attention_window.h
  float scale;
  float soft_cap;       // 0: none
  bool bfloat16;        // queries and outputs; else float32
  bool cache_bfloat16;  // key_cache and value_cache; else float32
};

// LogitStatisticsArgs of cpu_kernels.h, with the logit of each row's label.
struct DeviceLogitStatisticsArgs {
  const float* logits;  // [rows, width]
  const float* scales;  // [rows], or nullptr for 1
  const int64_t* labels;
  int64_t first_label;  // the token of column 0
  int64_t rows;
  int64_t width;
  float* max;  // [rows]
  float* sum;
  float* weighted;
  float* label;  // scaled; 0 where the label is not among the columns
};

// LogitGradientArgs of cpu_kernels.h, with `at_label` added at each row's label.
struct DeviceLogitGradientArgs {
  float* logits;  // [rows, width]
  const float* scales;
  const int64_t* labels;
  int64_t first_label;
  int64_t rows;
  int64_t width;
  const float* max;  // [rows]
  const float* constants;
  const float* slopes;
  const float* at_label;
  bool bfloat16;
  float soft_cap;  // 0: none
};

// Launches a kernel, and returns the error of the launch, or nullptr. Errors of the kernel itself
// surface at the next synchronisation.
template <typename Args>
using DeviceKernel = const char* (*)(const Args& args, DeviceStream stream);

// The table of kernels. ATen computes where an entry is nullptr.
struct DeviceKernels {
  DeviceKernel<DeviceRmsNormArgs> rms_norm = nullptr;
  DeviceKernel<DeviceRotaryArgs> rotary = nullptr;
  DeviceKernel<DeviceGatedArgs> gated = nullptr;
  DeviceKernel<DeviceGroupedLinearArgs> grouped_linear = nullptr;
  DeviceKernel<DeviceGroupedGradientArgs> grouped_gradient = nullptr;
  DeviceKernel<DeviceCacheWriteArgs> cache_write = nullptr;
  // The items, and then the fold of the partial results, which may be none.
  DeviceKernel<DevicePagedAttentionArgs> paged_attention = nullptr;
  DeviceKernel<DevicePagedAttentionArgs> fold_partials = nullptr;
  DeviceKernel<DeviceLogitStatisticsArgs> logit_statistics = nullptr;
  DeviceKernel<DeviceLogitGradientArgs> logit_gradient = nullptr;
  // Whether torch's at::_grouped_mm in bfloat16 is one kernel on the device of this index, which
  // reads its offsets there. On others it is a loop on the host, which waits for them.
  bool (*has_grouped_mm)(int device) = nullptr;
};

// The table of CUDA, in a build with CUDA (cuda/cuda_kernels.cc).
extern const DeviceKernels kCudaKernels;

}  // namespace tandem::kernels

#endif  // TANDEM_COMMON_KERNELS_DEVICE_KERNELS_H_
