// The division of a linear map among threads.
#ifndef TANDEM_COMMON_OPS_PARALLEL_LINEAR_H_
#define TANDEM_COMMON_OPS_PARALLEL_LINEAR_H_

#include <ATen/Parallel.h>

#include <algorithm>
#include <cstdint>

#include "common/kernels/weight_format.h"
#include "common/ops/parallel_for.h"

namespace tandem::ops {

// Rows of the input, and panels of kPanelOuts outputs.
struct LinearTile {
  int64_t row_begin, row_end;
  int64_t panel_begin, panel_end;
};

// Calls multiply(tile) for tiles that cover `rows` rows and `out` outputs of a map of `in` inputs.
// Threads divide the panels; where there are few panels they divide the rows too.
template <typename Function>
void ParallelLinear(int64_t rows, int64_t in, int64_t out, const Function& multiply) {
  constexpr int64_t kMinRows = 24;  // of a chunk
  const int64_t panels = kernels::PanelCount(out);
  const int64_t chunks =
      std::clamp<int64_t>(2 * at::get_num_threads() / std::max<int64_t>(1, panels), 1,
                          std::max<int64_t>(1, rows / kMinRows));
  ParallelFor(chunks * panels, kernels::kPanelOuts * in * rows / chunks,
              [&](int64_t begin, int64_t end) {
                while (begin < end) {
                  const int64_t chunk = begin / panels, last = std::min(end, (chunk + 1) * panels);
                  multiply(LinearTile{.row_begin = chunk * rows / chunks,
                                      .row_end = (chunk + 1) * rows / chunks,
                                      .panel_begin = begin - chunk * panels,
                                      .panel_end = last - chunk * panels});
                  begin = last;
                }
              });
}

}  // namespace tandem::ops

#endif  // TANDEM_COMMON_OPS_PARALLEL_LINEAR_H_
