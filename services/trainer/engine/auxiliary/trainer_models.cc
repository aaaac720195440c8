#include "services/trainer/engine/auxiliary/trainer_models.h"

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/base/errors/error.h"
#include "common/base/errors/status_macros.h"
#include "common/base/logging.h"
#include "common/loss/logits/linear_cross_entropy.h"

namespace tandem::trainer {
namespace {

// Loads the model in `path`, which must have the vocabulary of `core`'s model. FAILED_PRECONDITION
// (reason VOCABULARY_MISMATCH) if it does not; errors call it by `name` ("junior").
absl::StatusOr<std::unique_ptr<Model>> LoadSharingVocabulary(const std::string& path,
                                                             absl::string_view name,
                                                             training::TrainingCore& core) {
  const Model& model = core.model();
  // The same values for the same weights: a KL between equal models is 0.
  LoadOptions load = {.placement = {.device = model.device(),
                                    .dtype = model.dtype(),
                                    .weight_format = model.weight_format(),
                                    .weight_dtype = model.weight_dtype(),
                                    .activation_dtype = model.activation_dtype()}};
  const absl::StatusOr<Vocabulary> vocabulary = Vocabulary::Load(path);
  if (vocabulary.ok()) {
    load.num_token_ids = vocabulary->size();
    if (core.vocabulary() != nullptr) {
      TANDEM_RETURN_IF_ERROR(Vocabulary::CheckSame(*core.vocabulary(), *vocabulary, name));
    }
  } else if (!absl::IsNotFound(vocabulary.status())) {
    return vocabulary.status();
  }
  TANDEM_ASSIGN_OR_RETURN(std::unique_ptr<Model> loaded, Model::Load(path, load));
  if (loaded->num_token_ids() != model.num_token_ids()) {
    return WithReason(absl::FailedPreconditionError(absl::StrCat("has ", loaded->num_token_ids(),
                                                                 " token ids, but the model has ",
                                                                 model.num_token_ids())),
                      reason::kVocabularyMismatch);
  }
  return loaded;
}

// Returns null for an empty path. Errors name `field`.
absl::StatusOr<std::unique_ptr<Model>> LoadFrozen(absl::string_view field, absl::string_view name,
                                                  const std::string& path,
                                                  training::TrainingCore& core) {
  if (path.empty()) return nullptr;
  absl::StatusOr<std::unique_ptr<Model>> loaded = LoadSharingVocabulary(path, name, core);
  if (!loaded.ok()) return PrependFieldPath(field, loaded.status());
  return loaded;
}

// The same, or the model in training where that is what its adapters adapt (IsBaseModel).
absl::StatusOr<std::shared_ptr<const Model>> LoadTeacher(absl::string_view field,
                                                         absl::string_view name,
                                                         const std::string& path,
                                                         const EngineOptions& options,
                                                         training::TrainingCore& core) {
  if (IsBaseModel(path, options.model, core.model().lora().enabled(), options.strategy)) {
    return std::shared_ptr<const Model>(std::shared_ptr<void>(), &core.model());  // of the core
  }
  TANDEM_ASSIGN_OR_RETURN(std::shared_ptr<const Model> loaded, LoadFrozen(field, name, path, core));
  return loaded;
}

absl::StatusOr<std::unique_ptr<loss::LinearCrossEntropyLoss>> MakeLoss(
    const EngineOptions& options, const parallel::OutputShard& output,
    std::shared_ptr<loss::LogitsBuffer> buffer = nullptr) {
  absl::StatusOr<loss::LossImpl> impl = loss::ParseLossImpl(options.loss_impl);
  if (!impl.ok()) return PrependFieldPath("batch.loss_impl", impl.status());
  const int64_t most_rows = output.vocabulary.WithRows(output.weight.size(0)).most_rows;
  TANDEM_ASSIGN_OR_RETURN(std::unique_ptr<loss::LinearCrossEntropyLoss> made,
                          loss::LinearCrossEntropyLoss::Create(
                              output.weight, {.impl = *impl,
                                              .logits_chunk_bytes = LogitsChunkBytes(
                                                  options.logits_chunk_bytes, most_rows),
                                              .vocabulary = output.vocabulary,
                                              .soft_cap = output.soft_cap,
                                              .buffer = std::move(buffer)}));
  Log(made->is_fallback() ? LogLevel::kWarning : LogLevel::kInfo, "fused_output_loss",
      {{"impl", loss::LossImplName(made->impl())}, {"reason", made->reason()}});
  return made;
}

}  // namespace

absl::StatusOr<TrainerModels> LoadTrainerModels(const EngineOptions& options,
                                                training::TrainingCore& core) {
  TrainerModels models{.core = core};
  const Model& model = core.model();
  const parallel::OutputShard output = core.strategy().output_shard();
  const auto buffer = std::make_shared<loss::LogitsBuffer>();
  if (core.strategy().computes_output()) {
    TANDEM_ASSIGN_OR_RETURN(models.loss, MakeLoss(options, output, buffer));
  }
  TANDEM_ASSIGN_OR_RETURN(
      models.reference, LoadFrozen("reference_model", "reference", options.reference_model, core));
  if (models.reference != nullptr) {
    TANDEM_ASSIGN_OR_RETURN(models.reference_loss,
                            MakeLoss(options, {.weight = models.reference->output_weight(),
                                               .vocabulary = {},
                                               .soft_cap = models.reference->logit_soft_cap()}));
  }
  TANDEM_ASSIGN_OR_RETURN(
      models.junior, LoadTeacher("junior_model", "junior", options.junior_model, options, core));
  TANDEM_ASSIGN_OR_RETURN(
      models.teacher_kl,
      TeacherKl::Create(output, models.junior.get(), models.loss.get(),
                        LogitsChunkBytes(options.logits_chunk_bytes, model.num_token_ids())));
  TANDEM_ASSIGN_OR_RETURN(models.teacher, LoadTeacher("teacher_model", "teacher",
                                                      options.teacher_model, options, core));
  TANDEM_ASSIGN_OR_RETURN(
      models.distiller,
      Distiller::Create(output, core.strategy().computes_output(), models.teacher.get(),
                        LogitsChunkBytes(options.logits_chunk_bytes, model.num_token_ids()),
                        buffer));
  if (!options.speculator.adapter.empty()) {
    auto speculator = SpeculatorTrainer::Create(options, core);
    if (!speculator.ok()) return PrependFieldPath("speculator", speculator.status());
    models.speculator = *std::move(speculator);
    core.SetCompanion(models.speculator.get());
  }
  if (core.vocabulary() != nullptr) {
    const std::vector<int64_t>& eos = model.config().eos_token_ids;
    models.boundaries = std::make_unique<BoundarySets>(
        *core.vocabulary(), std::vector<int32_t>(eos.begin(), eos.end()));
  }
  return models;
}

}  // namespace tandem::trainer
