// Functions on a tile of logits that run between the matrix products: one implementation per file.
#ifndef TANDEM_COMMON_LOSS_LOGITS_LOGIT_KERNELS_H_
#define TANDEM_COMMON_LOSS_LOGITS_LOGIT_KERNELS_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "common/loss/logits/row_statistics.h"

namespace tandem::loss {

// Some rows of logits, with the columns [first_label, first_label + w) of the vocabulary.
// z = logits * scale. With a soft cap the logits are those after it.
struct LogitTile {
  at::Tensor logits;  // [n, w], contiguous; float32, or float64
  int64_t first_label;
  at::Tensor labels;  // [n], int64: token ids of the whole vocabulary
  at::Tensor scales;  // [n], 1 / temperature; undefined for 1
  std::optional<double> soft_cap = std::nullopt;
};

// The numbers of each row from which the gradient of its logits follows:
//   dz_j = exp(z_j - max) (constant + slope (z_j - max)) + at_label [j = y],
// times 1 - (logit_j / soft_cap)^2, the derivative of a soft cap.
struct RowGradients {
  at::Tensor max, constants, slopes, at_label;  // [n], in the type of the logits
};

// Returns the view [n, w] of a tile that holds its gradient in `type`: the type of the logits, or
// bf16, which takes the first half of every row.
at::Tensor GradientOf(const at::Tensor& logits, at::ScalarType type);

struct LogitKernels {
  // Fills `rows` [n], in the type of the logits, which stay unchanged.
  void (*statistics)(const LogitTile& tile, const RowStatistics& rows);

  // Overwrites the logits with their gradient, which is then GradientOf(tile.logits, type).
  void (*gradient)(const LogitTile& tile, const RowGradients& rows, at::ScalarType type);

  // Returns the bytes that a tile of `tile_bytes` needs beside itself, at most.
  int64_t (*scratch_bytes)(int64_t tile_bytes);
};

// ATen operations, on any device.
extern const LogitKernels kAtenLogitKernels;

// Own kernels of common/kernels/cpu: float32 on the CPU, without scratch memory.
extern const LogitKernels kCpuLogitKernels;

// Own kernels of a GPU (ops::DeviceKernelsOf) that has them: float32, without scratch memory.
extern const LogitKernels kDeviceLogitKernels;

// Returns the own kernels for logits of this type on this device, or nullptr where there are none,
// or ops::SetKernelPath has turned them off.
const LogitKernels* OwnLogitKernels(at::Device device, at::ScalarType logits_type);

}  // namespace tandem::loss

#endif  // TANDEM_COMMON_LOSS_LOGITS_LOGIT_KERNELS_H_
