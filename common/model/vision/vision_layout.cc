#include "common/model/vision/vision_layout.h"

#include <algorithm>

namespace tandem {
namespace {

// The image processor puts the patches that become one row of the text model side by side.
void AddPositions(const VisionGrid& grid, int64_t merge, VisionLayout& layout) {
  for (int64_t frame = 0; frame < grid.frames; ++frame) {
    for (int64_t top = 0; top < grid.height; top += merge) {
      for (int64_t left = 0; left < grid.width; left += merge) {
        for (int64_t i = 0; i < merge * merge; ++i) {
          layout.row.push_back(top + i / merge);
          layout.column.push_back(left + i % merge);
        }
      }
    }
  }
}

// `side` is that of a window, in groups of patches; `first_group` the number of groups before.
void AddWindows(const VisionGrid& grid, int64_t merge, int64_t side, int64_t first_group,
                VisionLayout& layout) {
  const int64_t height = grid.height / merge, width = grid.width / merge;
  for (int64_t frame = 0; frame < grid.frames; ++frame) {
    for (int64_t top = 0; top < height; top += side) {
      for (int64_t left = 0; left < width; left += side) {
        const int64_t bottom = std::min(top + side, height), right = std::min(left + side, width);
        layout.windows.push_back((bottom - top) * (right - left) * merge * merge);
        for (int64_t y = top; y < bottom; ++y) {
          for (int64_t x = left; x < right; ++x) {
            layout.group_order.push_back(first_group + (frame * height + y) * width + x);
          }
        }
      }
    }
  }
}

template <typename T>
std::vector<T> Reordered(const std::vector<T>& values, const std::vector<int64_t>& group_order,
                         int64_t group) {
  std::vector<T> result;
  result.reserve(values.size());
  for (const int64_t from : group_order) {
    const auto begin = values.begin() + from * group;
    result.insert(result.end(), begin, begin + group);
  }
  return result;
}

}  // namespace

VisionLayout LayOut(const VisionConfig& vision, const std::vector<VisionGrid>& grids) {
  const int64_t merge = vision.spatial_merge_size;
  VisionLayout layout;
  int64_t groups = 0;
  for (const VisionGrid& grid : grids) {
    AddPositions(grid, merge, layout);
    layout.frames.insert(layout.frames.end(), static_cast<size_t>(grid.frames),
                         grid.height * grid.width);
    if (vision.window_size > 0) {
      AddWindows(grid, merge, vision.window_size / merge / vision.patch_size, groups, layout);
    }
    groups += vision.Rows(grid);
  }
  if (vision.window_size == 0) {
    layout.windows = layout.frames;
    return layout;
  }
  layout.row = Reordered(layout.row, layout.group_order, vision.merge_unit());
  layout.column = Reordered(layout.column, layout.group_order, vision.merge_unit());
  return layout;
}

}  // namespace tandem
