// Where the patches of images are, and which of them attend to each other. No torch.
#ifndef TANDEM_COMMON_MODEL_VISION_VISION_LAYOUT_H_
#define TANDEM_COMMON_MODEL_VISION_VISION_LAYOUT_H_

#include <cstdint>
#include <vector>

#include "common/model/vision/vision_config.h"

namespace tandem {

// The P patches of some images, in the order in which a tower computes them: a tower with windows
// has the patches of a window side by side.
struct VisionLayout {
  std::vector<int64_t> row, column;  // [P] of each patch in its frame
  // [P / merge_unit]: the group of patches (a row of the output) that comes at each place. Empty:
  // the order of the input.
  std::vector<int64_t> group_order;
  // Numbers of patches that attend to each other, in layers with full attention (a frame), and in
  // the others (a window; the same as `frames` in a tower without windows).
  std::vector<int64_t> frames, windows;
};

VisionLayout LayOut(const VisionConfig& vision, const std::vector<VisionGrid>& grids);

}  // namespace tandem

#endif  // TANDEM_COMMON_MODEL_VISION_VISION_LAYOUT_H_
