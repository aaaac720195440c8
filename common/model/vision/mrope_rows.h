// The rotation of tokens with three positions (M-RoPE, https://arxiv.org/abs/2409.12191).
#ifndef TANDEM_COMMON_MODEL_VISION_MROPE_ROWS_H_
#define TANDEM_COMMON_MODEL_VISION_MROPE_ROWS_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "common/model/passes/ragged_batch.h"
#include "common/ops/rotary/rotary_table.h"

namespace tandem {

// Returns {cos, sin}, each [T, D/2], of the tokens of `batch`, which has rotary positions: the
// first `section[0]` frequencies turn by the position in time, the next `section[1]` by that in
// height, the others by that in width. Three equal positions give the bits of one.
std::pair<at::Tensor, at::Tensor> MropeRows(ops::RotaryTable& table,
                                            const std::vector<int64_t>& section,
                                            const RaggedBatch& batch);

}  // namespace tandem

#endif  // TANDEM_COMMON_MODEL_VISION_MROPE_ROWS_H_
