// The tokens of images in a sequence, as the KV cache tells them apart. No tensors.
#ifndef TANDEM_SERVICES_ROLLOUT_ENGINE_IMAGES_IMAGE_TOKENS_H_
#define TANDEM_SERVICES_ROLLOUT_ENGINE_IMAGES_IMAGE_TOKENS_H_

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "common/model/vision/prompt_images.h"

namespace tandem::rollout {

// The tokens [begin, end) of one image. Equal tokens with equal identities have equal keys and
// values, if the tokens before them are equal, too: the identity tells the pixels and the
// positions.
struct ImageTokens {
  int64_t begin = 0;
  int64_t end = 0;
  std::string identity;
};

std::vector<ImageTokens> ImageTokensOf(const PromptImages& images);

// Returns the identities of the images that have tokens among [begin, end), in their order; empty
// for text.
std::string IdentitiesAmong(std::span<const ImageTokens> images, int64_t begin, int64_t end);

}  // namespace tandem::rollout

#endif  // TANDEM_SERVICES_ROLLOUT_ENGINE_IMAGES_IMAGE_TOKENS_H_
