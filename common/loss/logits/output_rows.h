// Functions on the inputs of an output layer's loss: checks, copies to the device, division into
// chunks.
#ifndef TANDEM_COMMON_LOSS_LOGITS_OUTPUT_ROWS_H_
#define TANDEM_COMMON_LOSS_LOGITS_OUTPUT_ROWS_H_

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "common/loss/logits/fused_output_loss.h"
#include "common/ops/products/matrix_rows.h"

namespace tandem::loss {

// Checks the weight of an output layer. INVALID_ARGUMENT unless it is contiguous [V, H], or of
// ops::Bfloat16Rows; UNIMPLEMENTED unless it is float32, float64 or bfloat16.
absl::Status CheckOutputWeight(absl::string_view name, const ops::MatrixRows& weight);

// The following five return INVALID_ARGUMENT.

// Checks hidden states: [T, H], in the type of the weight, or bfloat16 if that is float32, or
// float32 for a weight that rounds them.
absl::Status CheckHidden(absl::string_view name, const at::Tensor& hidden,
                         const ops::MatrixRows& weight);
// Checks that the indices are in [0, end). The error says that an index is outside `outside`.
absl::Status CheckIndices(absl::string_view name, absl::Span<const int64_t> indices, int64_t end,
                          absl::string_view outside);
// Checks that a soft cap, if there is one, is positive and finite.
absl::Status CheckSoftCap(absl::string_view name, std::optional<double> soft_cap);
// Checks that there are no temperatures, or one for each of `rows`, all positive.
absl::Status CheckTemperatures(absl::Span<const double> temperatures, size_t rows);
// Checks that there is a finite number for each of `rows`.
absl::Status CheckScales(absl::Span<const double> scales, size_t rows);

// Whether the output layer is a map that rounds its inputs (ops::LinearWeight): bf16 on the CPU,
// with hidden states of float32.
bool RoundsHidden(const at::Tensor& hidden, const ops::MatrixRows& weight);

// Returns the rows `positions` of `hidden` [T, H] as [N, H]; `hidden` itself if the positions are
// 0 to T - 1. `indices` are the positions on its device.
at::Tensor SelectRows(const at::Tensor& hidden, absl::Span<const int64_t> positions,
                      const at::Tensor& indices);

// Appends the numbers of a chunk of rows, [n] or [m, n] float64, to m vectors. The first are their
// divergences: NotFiniteError, which names the row as one behind `first`, unless they are finite. A
// GPU is waited for, once.
absl::Status AppendDivergences(const at::Tensor& numbers, int64_t first,
                               std::initializer_list<std::vector<double>*> to);

// Adds the gradients of the output layer `weight` [V, H] and of its input to `gradients`, where
// they are wanted, from `dz` [n, V], the gradient of the logits, and `input` [n, H], both in the
// type of the weight. `positions` [n] are the rows of gradients.hidden.
void AddOutputGradients(const at::Tensor& dz, const at::Tensor& input,
                        const ops::MatrixRows& weight, const at::Tensor& positions,
                        OutputGradients& gradients);

// Rows of each chunk when `count` rows are divided into equal chunks of at most `max_rows`.
int64_t EqualChunkRows(int64_t count, int64_t max_rows);

}  // namespace tandem::loss

#endif  // TANDEM_COMMON_LOSS_LOGITS_OUTPUT_ROWS_H_
