// A tile of the result of a linear map.
#ifndef TANDEM_COMMON_OPS_PRODUCTS_LINEAR_TILE_H_
#define TANDEM_COMMON_OPS_PRODUCTS_LINEAR_TILE_H_

#include <cstdint>

namespace tandem::ops {

// Rows of the input, and panels of kPanelOuts outputs (common/kernels/weight_format.h).
struct LinearTile {
  int64_t row_begin, row_end;
  int64_t panel_begin, panel_end;
};

}  // namespace tandem::ops

#endif  // TANDEM_COMMON_OPS_PRODUCTS_LINEAR_TILE_H_
