// The images and videos of one prompt, and of the turns of an environment behind it, made from what
// a request names. No torch.
#ifndef TANDEM_COMMON_MODEL_VISION_PROMPT_IMAGES_H_
#define TANDEM_COMMON_MODEL_VISION_PROMPT_IMAGES_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
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

// The images of a sequence, and where FindImages found them.
struct PromptImages {
  uint64_t id = 0;  // in the process that made it; never used again
  std::vector<VisionInput> inputs;
  ImagePositions found;

  // Number of tokens that `found` has positions of.
  int64_t num_placed() const { return static_cast<int64_t>(found.positions[0].size()); }
};

// Returns the images of a sequence; nullptr for text alone. `vision` is nullptr for a model that
// takes no images, whose prompts are text whatever their ids. INVALID_ARGUMENT with "vision_inputs"
// for images that the model does not take, with "vision_inputs[i]" for one that does not fit the
// tokens (FindImages), or whose blob has another size than its grid; FAILED_PRECONDITION
// (BLOB_MISSING) for one whose blob is not among `blobs`.
absl::StatusOr<std::shared_ptr<const PromptImages>> MakePromptImages(
    const VisionConfig* vision, absl::Span<const int32_t> prompt,
    absl::Span<const int32_t> response, absl::Span<const VisionReference> references,
    const Blobs& blobs);

// Checks that the images behind the prompt are an environment's, and that every token of an
// environment that would mean an image has one. `is_drawn` says whether a model wrote a token of
// the response, which is the field `field`. INVALID_ARGUMENT with "vision_inputs[i].first_token" or
// "<field>[t]".
absl::Status CheckImagesOfTurns(const VisionConfig& vision, const PromptImages* images,
                                int64_t prompt_tokens, absl::string_view field,
                                absl::Span<const int32_t> response,
                                absl::FunctionRef<bool(size_t t)> is_drawn);

// Whether two models read the same pixels at the same tokens of a prompt.
bool TakesSamePixels(const VisionConfig& a, const VisionConfig& b);
// The same, and at the same positions.
bool TakesSameImages(const VisionConfig& a, const VisionConfig& b);

}  // namespace tandem

#endif  // TANDEM_COMMON_MODEL_VISION_PROMPT_IMAGES_H_
