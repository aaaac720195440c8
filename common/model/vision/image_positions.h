// The tokens of a sequence that stand for images, and the positions of its tokens in time, height
// and width. The rule is get_rope_index of `transformers`. No torch.
#ifndef TANDEM_COMMON_MODEL_VISION_IMAGE_POSITIONS_H_
#define TANDEM_COMMON_MODEL_VISION_IMAGE_POSITIONS_H_

#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/model/vision/vision_config.h"

namespace tandem {

// The shape of one image or video, and its place.
struct ImageShape {
  VisionGrid grid;
  bool is_video = false;
  // Seconds from one temporal patch of a video to the next; read where the model has a
  // tokens_per_second.
  double seconds_per_grid = 1.0;
  // Index of its first token in the sequence, in an environment's turn; nullopt: its tokens are the
  // prompt's next ones.
  std::optional<int64_t> first_token = std::nullopt;
};

struct ImagePositions {
  // For each image, the index of its first token and one past that of its last. There are
  // VisionConfig::Rows of them.
  std::vector<int64_t> first_tokens, end_tokens;
  // The positions of each token up to the end of the prompt, or of the last image behind it: time,
  // height, width.
  std::array<std::vector<int64_t>, 3> positions = {};
  // The three positions of the next token, which are equal, and every later one is one more.
  int64_t next = 0;
};

// Finds the images, in their order, among the tokens of a sequence. Every token of the prompt that
// stands for an image needs one; a model may write such a token, as text, so an image in the
// response says its place. INVALID_ARGUMENT with "vision_inputs[i]" for a grid that has no patches
// or does not divide into squares, for seconds out of range, or for an image whose tokens are not
// there, or too few of them; with "vision_inputs[i].first_token" for a place that is not behind the
// prompt and the image before; with "vision_inputs" for tokens of an image that is not given.
absl::StatusOr<ImagePositions> FindImages(const VisionConfig& vision,
                                          absl::Span<const int32_t> prompt,
                                          absl::Span<const int32_t> response,
                                          absl::Span<const ImageShape> images);

}  // namespace tandem

#endif  // TANDEM_COMMON_MODEL_VISION_IMAGE_POSITIONS_H_
