// The images of a step's samples.
#ifndef TANDEM_SERVICES_TRAINER_ENGINE_AUXILIARY_SAMPLE_IMAGES_H_
#define TANDEM_SERVICES_TRAINER_ENGINE_AUXILIARY_SAMPLE_IMAGES_H_

#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "common/model/model.h"
#include "common/model/vision/prompt_images.h"
#include "services/trainer/engine/types.h"
#include "services/training_core/training_core.h"

namespace tandem::trainer {

// One for each sample; nullptr for text alone.
using SampleImages = std::vector<std::shared_ptr<const PromptImages>>;

// Return the images of the samples, as the model in training reads them. Errors of MakePromptImages
// with the path of the sample.
absl::StatusOr<SampleImages> ImagesOf(training::TrainingCore& core, const PolicyBatch& batch,
                                      const Blobs& blobs);
absl::StatusOr<SampleImages> ImagesOf(training::TrainingCore& core, const SupervisedBatch& batch,
                                      const Blobs& blobs);

// FAILED_PRECONDITION (NO_IMAGES) with the setting `field` of a frozen model unless it reads the
// images as the model in training does; OK for samples without images.
absl::Status CheckTakesImages(absl::string_view field, const Model& frozen,
                              training::TrainingCore& core, const SampleImages& images);

}  // namespace tandem::trainer

#endif  // TANDEM_SERVICES_TRAINER_ENGINE_AUXILIARY_SAMPLE_IMAGES_H_
