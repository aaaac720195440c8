#include "common/model/vision/mrope_rows.h"

#include <ATen/ATen.h>

namespace tandem {

std::pair<at::Tensor, at::Tensor> MropeRows(ops::RotaryTable& table,
                                            const std::vector<int64_t>& section,
                                            const RaggedBatch& batch) {
  std::vector<at::Tensor> cos, sin;
  int64_t begin = 0;
  for (int64_t axis = 0; axis < 3; ++axis) {
    const auto rows = table.Rows(batch.images.rotary_positions[axis], batch.images.rotary_end);
    cos.push_back(rows.first.narrow(1, begin, section[axis]));
    sin.push_back(rows.second.narrow(1, begin, section[axis]));
    begin += section[axis];
  }
  return {at::cat(cos, 1), at::cat(sin, 1)};
}

}  // namespace tandem
