#include "services/trainer/engine/auxiliary/sample_images.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/errors/error.h"

namespace tandem::trainer {
namespace {

// `sequence_of` returns what of a sample holds the tokens, and `path` is where it stands in it.
template <typename Batch, typename SequenceOf>
absl::StatusOr<SampleImages> ImagesOfSamples(training::TrainingCore& core, const Batch& batch,
                                             const Blobs& blobs, absl::string_view path,
                                             SequenceOf sequence_of) {
  SampleImages all;
  for (size_t i = 0; i < batch.samples.size(); ++i) {
    const auto& sequence = sequence_of(batch.samples[i]);
    auto images = core.ImagesOf(sequence.prompt_token_ids, sequence.vision_inputs, blobs);
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
  return ImagesOfSamples(
      core, batch, blobs, ".trajectory",
      [](const PolicySample& sample) -> auto& { return sample.trajectory; });
}

absl::StatusOr<SampleImages> ImagesOf(training::TrainingCore& core, const SupervisedBatch& batch,
                                      const Blobs& blobs) {
  return ImagesOfSamples(
      core, batch, blobs, "", [](const SupervisedSample& sample) -> auto& { return sample; });
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
