// The images of a batch's sequences, as a pass reads them (BatchImages).
#ifndef TANDEM_COMMON_MODEL_VISION_IMAGE_BATCH_H_
#define TANDEM_COMMON_MODEL_VISION_IMAGE_BATCH_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/types/span.h"
#include "common/model/passes/ragged_batch.h"
#include "common/model/vision/prompt_images.h"

namespace tandem {

// Returns the pixels of an image, [patches, VisionConfig::patch_values] float32 on the host: a view
// of its blob.
at::Tensor PixelValues(const VisionInput& input);

// Collects the images of a batch, sequence by sequence.
class ImageBatch {
 public:
  explicit ImageBatch(const VisionConfig& vision) : vision_(vision) {}

  // Adds the tokens [start, start + count) of a sequence; `images` is nullptr for text alone. The
  // tower will compute the images among them.
  void AddTokens(const PromptImages* images, int64_t start, int64_t count);
  // The same with what the tower computed before: `rows[i]` [rows, H] is of the i-th image.
  void AddComputedTokens(const PromptImages* images, absl::Span<const at::Tensor> rows,
                         int64_t start, int64_t count);

  // Returns the images on `device`, nothing at all if no sequence has one.
  BatchImages Take(at::Device device);

 private:
  void AddPositions(const PromptImages* images, int64_t start, int64_t count);
  // Adds the tokens of image i that are among [start, start + count), where `first_row` is the
  // tower's first row of the image.
  void AddRows(const PromptImages& images, size_t i, int64_t first_row, int64_t start,
               int64_t count);

  const VisionConfig& vision_;
  bool has_images_ = false;
  int64_t tokens_ = 0;      // added so far
  int64_t tower_rows_ = 0;  // of the inputs so far
  std::vector<int64_t> positions_[3];
  std::vector<int64_t> token_row_, tower_row_;
  std::map<std::pair<const std::string*, VisionGrid>, int64_t> first_row_;  // by blob and grid
  std::vector<at::Tensor> pixel_values_, computed_;
  std::vector<VisionGrid> grids_;
};

}  // namespace tandem

#endif  // TANDEM_COMMON_MODEL_VISION_IMAGE_BATCH_H_
