// The work on a tile of logits that lies between the matrix products: one implementation a file.
#ifndef TANDEM_COMMON_LOSS_LOGIT_KERNELS_H_
#define TANDEM_COMMON_LOSS_LOGIT_KERNELS_H_

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "common/loss/row_statistics.h"

namespace tandem::loss {

// Some rows of logits, and of each the columns [first_label, first_label + w) of the vocabulary.
// z = logits * scale.
struct LogitTile {
  at::Tensor logits;  // [n, w], contiguous; float32, or float64
  int64_t first_label;
  at::Tensor labels;  // [n], int64: token ids of the whole vocabulary
  at::Tensor scales;  // [n], 1 / temperature; undefined for 1
};

// The gradient of a row's logits by what is known of the row alone:
//   exp(z_j - max) (constant + slope (z_j - max)) + at_label [j = y].
struct RowGradients {
  at::Tensor max, constants, slopes, at_label;  // [n], in the type of the logits
};

// Where a tile's gradient in `type` lies: the type of the logits, or bf16, which takes the first
// half of every row. [n, w]
at::Tensor GradientOf(const at::Tensor& logits, at::ScalarType type);

class LogitKernels {
 public:
  virtual ~LogitKernels() = default;

  // Fills `rows` [n], in the type of the logits, which stay as they are.
  virtual void Statistics(const LogitTile& tile, const RowStatistics& rows) const = 0;

  // Overwrites the logits with their gradient, which is then GradientOf(tile.logits, type).
  virtual void Gradient(const LogitTile& tile, const RowGradients& rows,
                        at::ScalarType type) const = 0;

  // Most memory that a tile of `tile_bytes` needs beside itself.
  virtual int64_t ScratchBytes(int64_t tile_bytes) const = 0;
};

// ATen operations, on any device.
const LogitKernels& AtenLogitKernels();

// Own kernels of common/kernels/cpu: float32 on the CPU, without scratch memory.
const LogitKernels& CpuLogitKernels();

// Own kernels of common/kernels/cuda, in a CUDA build: float32 on a GPU, without scratch memory.
const LogitKernels& CudaLogitKernels();

}  // namespace tandem::loss

#endif  // TANDEM_COMMON_LOSS_LOGIT_KERNELS_H_
