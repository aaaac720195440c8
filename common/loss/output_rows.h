// What the losses of an output layer do alike with what they are given: check it, bring it to the
// device, cut it.
#ifndef TANDEM_COMMON_LOSS_OUTPUT_ROWS_H_
#define TANDEM_COMMON_LOSS_OUTPUT_ROWS_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace tandem::loss {

// The weight of an output layer: contiguous [V, H], INVALID_ARGUMENT if it is not; float32, float64
// or bfloat16, UNIMPLEMENTED for other types.
absl::Status CheckOutputWeight(absl::string_view name, const at::Tensor& weight);

// The following return INVALID_ARGUMENT.

// Hidden states [T, H] of the layer, in its type, or bfloat16 where that is float32.
absl::Status CheckHidden(absl::string_view name, const at::Tensor& hidden,
                         const at::Tensor& weight);
// Indices in [0, end); `outside` says what others are outside of.
absl::Status CheckIndices(absl::string_view name, absl::Span<const int64_t> indices, int64_t end,
                          absl::string_view outside);
// None, or one for each of `rows`, positive.
absl::Status CheckTemperatures(absl::Span<const double> temperatures, size_t rows);

// Copies of host numbers, without a wait for the device.
at::Tensor ToDevice(const std::vector<double>& numbers, const at::TensorOptions& like);
at::Tensor ToDevice(const std::vector<int64_t>& numbers, at::Device device);

// Rows `positions` of `hidden` [T, H] -> [N, H]; `hidden` itself if they are all, in order.
// `indices` are the positions on its device.
at::Tensor SelectRows(const at::Tensor& hidden, absl::Span<const int64_t> positions,
                      const at::Tensor& indices);

// The size of equal parts of `count` things, at most `most` in each.
int64_t EqualParts(int64_t count, int64_t most);

}  // namespace tandem::loss

#endif  // TANDEM_COMMON_LOSS_OUTPUT_ROWS_H_
