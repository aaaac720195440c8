// The images and videos of one prompt, made from what a request names. No torch.
#ifndef TANDEM_COMMON_MODEL_VISION_PROMPT_IMAGES_H_
#define TANDEM_COMMON_MODEL_VISION_PROMPT_IMAGES_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/model/vision/image_positions.h"
#include "common/model/vision/vision_config.h"
#include "common/tensor/vision_reference.h"

namespace tandem {

// One image or video.
struct VisionInput {
  ImageShape shape;
  std::string digest;  // of the pixels
  // float32 [grid.patches(), VisionConfig::patch_values]. Inputs with the same blob and grid have
  // the same rows: the tower computes them once in a batch.
  Blob pixels;
};

// The images of a prompt, and where FindImages found them.
struct PromptImages {
  uint64_t id = 0;  // in the process that made it; never used again
  std::vector<VisionInput> inputs;
  ImagePositions found;

  int64_t prompt_length() const { return static_cast<int64_t>(found.positions[0].size()); }
};

// Returns the images of a prompt; nullptr for text alone. `vision` is nullptr for a model that
// takes no images, whose prompts are text whatever their ids. INVALID_ARGUMENT with "vision_inputs"
// for images that the model does not take, with "vision_inputs[i]" for one that does not fit the
// prompt (FindImages), or whose blob has another size than its grid; FAILED_PRECONDITION
// (BLOB_MISSING) for one whose blob is not among `blobs`.
absl::StatusOr<std::shared_ptr<const PromptImages>> MakePromptImages(
    const VisionConfig* vision, absl::Span<const int32_t> prompt,
    absl::Span<const VisionReference> references, const Blobs& blobs);

// Whether two models read the same pixels at the same tokens of a prompt.
bool TakesSamePixels(const VisionConfig& a, const VisionConfig& b);
// The same, and at the same positions.
bool TakesSameImages(const VisionConfig& a, const VisionConfig& b);

}  // namespace tandem

#endif  // TANDEM_COMMON_MODEL_VISION_PROMPT_IMAGES_H_
