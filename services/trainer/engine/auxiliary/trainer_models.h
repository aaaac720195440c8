// The models of a trainer and the output losses that read them.
#ifndef TANDEM_SERVICES_TRAINER_ENGINE_AUXILIARY_TRAINER_MODELS_H_
#define TANDEM_SERVICES_TRAINER_ENGINE_AUXILIARY_TRAINER_MODELS_H_

#include <memory>

#include "absl/status/statusor.h"
#include "common/coauthoring/vocabulary.h"
#include "common/loss/logits/linear_cross_entropy.h"
#include "common/model/model.h"
#include "services/trainer/engine/auxiliary/distiller.h"
#include "services/trainer/engine/auxiliary/speculator_trainer.h"
#include "services/trainer/engine/auxiliary/teacher_kl.h"
#include "services/trainer/engine/steps/objective.h"
#include "services/trainer/engine/types.h"
#include "services/training_core/training_core.h"

namespace tandem::trainer {

// The models and losses of a trainer, used on the engine thread of `core`.
struct TrainerModels {
  training::TrainingCore& core;  // has the model in training
  // Null on a rank that computes no output.
  std::unique_ptr<loss::LinearCrossEntropyLoss> loss = nullptr;
  // Whether there is a reference policy: a model of its own, or the one in training without its
  // adapters.
  bool has_reference() const { return reference != nullptr || core.model().lora().enabled(); }

  // Frozen. Null where none is configured.
  std::unique_ptr<Model> reference = nullptr;
  std::unique_ptr<loss::LinearCrossEntropyLoss> reference_loss = nullptr;
  // These two may be the model in training, whose adapters are off in their passes.
  std::shared_ptr<const Model> junior = nullptr;
  // The KL towards the junior, as a teacher.
  std::unique_ptr<TeacherKl> teacher_kl = nullptr;
  std::shared_ptr<const Model> teacher = nullptr;  // null where none is configured
  std::unique_ptr<Distiller> distiller = nullptr;
  // Trains beside the model. Null where none is configured.
  std::unique_ptr<SpeculatorTrainer> speculator = nullptr;
  // Tokens that end a sentence. Null without a tokenizer.json beside the model.
  std::unique_ptr<BoundarySets> boundaries = nullptr;
};

// Loads the frozen models and the speculator that `options` name, and makes the losses. Errors name
// the field: "reference_model", "junior_model", "teacher_model", "speculator.n_predict",
// "batch.loss_impl".
absl::StatusOr<TrainerModels> LoadTrainerModels(const EngineOptions& options,
                                                training::TrainingCore& core);

}  // namespace tandem::trainer

#endif  // TANDEM_SERVICES_TRAINER_ENGINE_AUXILIARY_TRAINER_MODELS_H_
