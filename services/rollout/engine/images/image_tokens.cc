#include "services/rollout/engine/images/image_tokens.h"

#include <bit>

#include "absl/strings/str_cat.h"

namespace tandem::rollout {

std::vector<ImageTokens> ImageTokensOf(const PromptImages& images) {
  std::vector<ImageTokens> tokens;
  for (size_t i = 0; i < images.inputs.size(); ++i) {
    const ImageShape& shape = images.inputs[i].shape;
    tokens.push_back(
        {.begin = images.found.first_tokens[i],
         .end = images.found.end_tokens[i],
         .identity = absl::StrCat(images.inputs[i].digest, " ", shape.is_video, " ",
                                  shape.grid.frames, " ", shape.grid.height, " ", shape.grid.width,
                                  " ", std::bit_cast<uint64_t>(shape.seconds_per_grid), ";")});
  }
  return tokens;
}

std::string IdentitiesAmong(std::span<const ImageTokens> images, int64_t begin, int64_t end) {
  std::string identities;
  for (const ImageTokens& image : images) {
    if (image.begin < end && image.end > begin) identities += image.identity;
  }
  return identities;
}

}  // namespace tandem::rollout
