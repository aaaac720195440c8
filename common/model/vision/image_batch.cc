#include "common/model/vision/image_batch.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "common/tensor/aten/device_copies.h"

namespace tandem {

at::Tensor PixelValues(const VisionInput& input) {
  const int64_t patches = input.shape.grid.patches();
  const int64_t values = static_cast<int64_t>(input.pixels->size() / sizeof(float));
  // Tensors have no type for memory that is not written.
  // NOLINTNEXTLINE(cppcoreguidelines-pro-type-const-cast)
  return at::from_blob(
      const_cast<char*>(input.pixels->data()), {patches, values / patches},
      [pixels = input.pixels](void*) {}, at::TensorOptions().dtype(at::kFloat));
}

void ImageBatch::AddPositions(const PromptImages* images, int64_t start, int64_t count) {
  has_images_ = has_images_ || images != nullptr;
  for (int axis = 0; axis < 3; ++axis) {
    for (int64_t p = start; p < start + count; ++p) {
      int64_t position = p;
      if (images != nullptr) {
        const int64_t placed = images->num_placed();
        position = p < placed ? images->found.positions[axis][static_cast<size_t>(p)]
                              : images->found.next + p - placed;
      }
      positions_[axis].push_back(position);
    }
  }
}

void ImageBatch::AddRows(const PromptImages& images, size_t i, int64_t first_row, int64_t start,
                         int64_t count) {
  const int64_t first = images.found.first_tokens[i];
  const int64_t begin = std::max(first, start),
                end = std::min(images.found.end_tokens[i], start + count);
  for (int64_t p = begin; p < end; ++p) {
    token_row_.push_back(tokens_ + p - start);
    tower_row_.push_back(first_row + p - first);
  }
}

void ImageBatch::AddTokens(const PromptImages* images, int64_t start, int64_t count) {
  AddPositions(images, start, count);
  for (size_t i = 0; images != nullptr && i < images->inputs.size(); ++i) {
    const VisionInput& input = images->inputs[i];
    const auto [found, is_new] =
        first_row_.try_emplace({input.pixels.get(), input.shape.grid}, tower_rows_);
    if (is_new) {
      pixel_values_.push_back(PixelValues(input));
      grids_.push_back(input.shape.grid);
      tower_rows_ += vision_.Rows(input.shape.grid);
    }
    AddRows(*images, i, found->second, start, count);
  }
  tokens_ += count;
}

void ImageBatch::AddComputedTokens(const PromptImages* images, absl::Span<const at::Tensor> rows,
                                   int64_t start, int64_t count) {
  AddPositions(images, start, count);
  for (size_t i = 0; images != nullptr && i < images->inputs.size(); ++i) {
    const size_t before = token_row_.size();
    AddRows(*images, i, tower_rows_, start, count);
    if (token_row_.size() == before) continue;
    computed_.push_back(rows[i]);
    tower_rows_ += rows[i].size(0);
  }
  tokens_ += count;
}

BatchImages ImageBatch::Take(at::Device device) {
  if (!has_images_) return {};
  BatchImages images;
  if (!pixel_values_.empty()) images.pixel_values = CopyToDevice(at::cat(pixel_values_, 0), device);
  images.grids = std::move(grids_);
  if (!computed_.empty()) images.rows_of_tower = at::cat(computed_, 0);
  images.token_rows = CopyToDevice(token_row_, device);
  images.tower_rows = CopyToDevice(tower_row_, device);
  std::vector<at::Tensor> axes;
  for (const std::vector<int64_t>& positions : positions_) {
    axes.push_back(CopyToDevice(positions, device));
    for (const int64_t position : positions) {
      images.rotary_end = std::max(images.rotary_end, position + 1);
    }
  }
  images.rotary_positions = at::stack(axes, 0);
  return images;
}

}  // namespace tandem
