#include "services/trainer/engine/auxiliary/sample_images.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/errors/error.h"
#include "common/base/errors/status_macros.h"
#include "common/coauthoring/author.h"

namespace tandem::trainer {
namespace {

absl::StatusOr<std::shared_ptr<const PromptImages>> ImagesOf(training::TrainingCore& core,
                                                             const SupervisedSample& sample,
                                                             const Blobs& blobs) {
  return core.ImagesOf(sample.prompt_token_ids, sample.response_token_ids, sample.vision_inputs,
                       blobs);
}

absl::StatusOr<std::shared_ptr<const PromptImages>> ImagesOf(training::TrainingCore& core,
                                                             const PolicySample& sample,
                                                             const Blobs& blobs) {
  const Trajectory& written = sample.trajectory;
  TANDEM_ASSIGN_OR_RETURN(auto images,
                          core.ImagesOf(written.prompt_token_ids, written.response_token_ids,
                                        written.vision_inputs, blobs));
  if (const auto& vision = core.model().config().vision; vision.has_value()) {
    TANDEM_RETURN_IF_ERROR(CheckImagesOfTurns(
        *vision, images.get(), std::ssize(written.prompt_token_ids), "response_token_ids",
        written.response_token_ids, [&](size_t t) { return IsDrawn(written.authorship_mask[t]); }));
  }
  return images;
}

// `path` is where a sample's tokens stand in it.
template <typename Batch>
absl::StatusOr<SampleImages> ImagesOfSamples(training::TrainingCore& core, const Batch& batch,
                                             const Blobs& blobs, absl::string_view path) {
  SampleImages all;
  for (size_t i = 0; i < batch.samples.size(); ++i) {
    auto images = ImagesOf(core, batch.samples[i], blobs);
    if (!images.ok()) {
      return PrependFieldPath(absl::StrCat("samples[", i, "]", path), images.status());
    }
    all.push_back(*std::move(images));
  }
  return all;
}

}  // namespace

absl::StatusOr<SampleImages> ImagesOf(training::TrainingCore& core, const PolicyBatch& batch,
                                      const Blobs& blobs) {
  return ImagesOfSamples(core, batch, blobs, ".trajectory");
}

absl::StatusOr<SampleImages> ImagesOf(training::TrainingCore& core, const SupervisedBatch& batch,
                                      const Blobs& blobs) {
  return ImagesOfSamples(core, batch, blobs, "");
}

absl::Status CheckTakesImages(absl::string_view field, const Model& frozen,
                              training::TrainingCore& core, const SampleImages& images) {
  const bool is_text =
      std::all_of(images.begin(), images.end(), [](const auto& one) { return one == nullptr; });
  if (is_text) return absl::OkStatus();
  const auto& vision = frozen.config().vision;
  if (vision.has_value() && TakesSameImages(*vision, *core.model().config().vision)) {
    return absl::OkStatus();
  }
  return WithReason(FieldError(absl::StatusCode::kFailedPrecondition, field,
                               "does not read images in the same way as the model in training"),
                    reason::kNoImages);
}

}  // namespace tandem::trainer
