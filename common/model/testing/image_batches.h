// For tests: batches with images, for models with a vision tower.
#ifndef TANDEM_COMMON_MODEL_TESTING_IMAGE_BATCHES_H_
#define TANDEM_COMMON_MODEL_TESTING_IMAGE_BATCHES_H_

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/model/model.h"
#include "common/model/vision/image_batch.h"

namespace tandem {

// Returns the bytes of random pixels.
inline Blob RandomPixels(const VisionConfig& vision, const VisionGrid& grid, uint64_t seed) {
  const at::Tensor pixels =
      at::randn({grid.patches(), vision.patch_values()}, at::detail::createCPUGenerator(seed),
                at::TensorOptions().dtype(at::kFloat));
  return std::make_shared<const std::string>(static_cast<const char*>(pixels.const_data_ptr()),
                                             static_cast<size_t>(pixels.nbytes()));
}

inline VisionInput RandomImage(const VisionConfig& vision, const ImageShape& shape, uint64_t seed) {
  return {.shape = shape,
          .digest = absl::StrCat("seed ", seed),
          .pixels = RandomPixels(vision, shape.grid, seed)};
}

// Returns a batch of whole sequences with the images of each, of which nullptr has none, and with
// the `starts` of MakeRaggedBatch.
inline RaggedBatch MakeBatchOf(const Model& model,
                               const std::vector<std::vector<int64_t>>& sequences,
                               const std::vector<std::unique_ptr<PromptImages>>& images,
                               const std::vector<int64_t>& starts = {}) {
  RaggedBatch batch = MakeRaggedBatch(sequences, model.device(), starts);
  ImageBatch collected(*model.config().vision);
  for (size_t s = 0; s < sequences.size(); ++s) {
    const int64_t start = starts.empty() ? 0 : starts[s];
    collected.AddTokens(images[s].get(), start, static_cast<int64_t>(sequences[s].size()) - start);
  }
  batch.images = collected.Take(model.device());
  return batch;
}

// Returns a batch of whole sequences. If the model has a vision tower, sequences of five tokens or
// more have an image of four tokens, the same for all, behind their first token, and those of nine
// or more also a video of two, of their own. `starts` are those of MakeRaggedBatch.
inline RaggedBatch MakeBatchWithImages(const Model& model,
                                       std::vector<std::vector<int64_t>> sequences,
                                       const std::vector<int64_t>& starts = {}) {
  if (!model.config().vision.has_value()) {
    return MakeRaggedBatch(sequences, model.device(), starts);
  }
  const VisionConfig& vision = *model.config().vision;
  const auto image = RandomImage(vision, {.grid = {1, 4, 4}}, 7);
  std::vector<std::unique_ptr<PromptImages>> images;
  for (std::vector<int64_t>& tokens : sequences) {
    images.push_back(nullptr);
    if (tokens.size() < 5) continue;
    images.back() = std::make_unique<PromptImages>();
    PromptImages& prompt = *images.back();
    prompt.inputs = {image};
    std::vector<int64_t> first = {1, vision.image_token_id, vision.image_token_id,
                                  vision.image_token_id, vision.image_token_id};
    if (tokens.size() >= 9) {
      prompt.inputs.push_back(RandomImage(
          vision, {.grid = {2, 2, 2}, .is_video = true, .seconds_per_grid = 0.5}, images.size()));
      first.insert(first.end(), {2, vision.video_token_id, vision.video_token_id});
    }
    std::copy(first.begin(), first.end(), tokens.begin());
    std::vector<ImageShape> shapes;
    for (const auto& input : prompt.inputs) shapes.push_back(input.shape);
    const std::vector<int32_t> narrow(first.begin(), first.end());
    prompt.found = FindImages(vision, narrow, {}, shapes).value();
  }
  return MakeBatchOf(model, sequences, images, starts);
}

// Returns a batch of whole sequences. If the model has a vision tower, each has an image of its own
// behind its first token, into which the image must fit.
inline RaggedBatch MakeBatchWithLargeImages(const Model& model,
                                            std::vector<std::vector<int64_t>> sequences,
                                            const ImageShape& shape) {
  if (!model.config().vision.has_value()) return MakeRaggedBatch(sequences, model.device());
  const VisionConfig& vision = *model.config().vision;
  std::vector<std::unique_ptr<PromptImages>> images;
  for (std::vector<int64_t>& tokens : sequences) {
    std::fill_n(tokens.begin() + 1, vision.Rows(shape.grid), vision.image_token_id);
    const std::vector<int32_t> narrow(tokens.begin(), tokens.end());
    images.push_back(std::make_unique<PromptImages>(
        PromptImages{.inputs = {RandomImage(vision, shape, images.size())},
                     .found = FindImages(vision, narrow, {}, {shape}).value()}));
  }
  return MakeBatchOf(model, sequences, images);
}

}  // namespace tandem

#endif  // TANDEM_COMMON_MODEL_TESTING_IMAGE_BATCHES_H_
