#include "services/trainer/engine/steps/supervised_step.h"

#include "common/base/errors/error.h"
#include "common/base/errors/status_macros.h"
#include "common/loss/supervised_loss.h"
#include "services/trainer/engine/auxiliary/sample_images.h"
#include "services/trainer/engine/steps/row_passes.h"
#include "services/trainer/engine/steps/step_metrics.h"

namespace tandem::trainer {
namespace {

constexpr char kNoTargetReason[] =
    "every sequence of the batch is too short for the speculator, the only model that trains";

}  // namespace

absl::StatusOr<std::vector<training::TrainingCore::UpdateGradients>> SupervisedStep::Prepare(
    StepReport& report) {
  TANDEM_RETURN_IF_ERROR(CheckSupervisedBatch(batch_, limits_));
  TANDEM_ASSIGN_OR_RETURN(const SampleImages images, ImagesOf(models_.core, batch_, blobs_));
  if (batch_.objective.distillation.reads_model()) {
    TANDEM_RETURN_IF_ERROR(
        CheckTakesImages("teacher_model", *models_.teacher, models_.core, images));
  }
  absl::StatusOr<loss::LossScales> scales = SupervisedScales(batch_);
  if (!scales.ok()) return PrependFieldPath("supervised", scales.status());
  AddBatchMetrics(batch_, report.metrics);
  rows_ = SupervisedRows(batch_, *scales);
  rows_.sequences.SetImages(images);
  std::vector<training::TrainingCore::UpdateGradients> updates;
  if (models_.core.frozen() && !models_.speculator->HasTargets(rows_, rows_.sequences.all())) {
    report.skipped = true;
    report.skip_reason = kNoTargetReason;
    return updates;
  }
  updates.emplace_back([this](StepReport& of_update) { return AddUpdate(of_update); });
  return updates;
}

absl::Status SupervisedStep::AddUpdate(StepReport& report) {
  if (models_.core.frozen()) return AddSpeculatorGradients(models_, rows_, report);
  loss::SupervisedLossEvaluator evaluator(rows_.tokens.scales);
  UpdateLoss update_loss = {
      .evaluate = [&](auto... arguments) { return evaluator.Evaluate(arguments...); }};
  const DistillationOptions& distillation = batch_.objective.distillation;
  DistillationSums distilled;
  distilled.teachers.resize(rows_.distillation.names.size());
  if (distillation.is_on()) {
    update_loss.add = [&](const training::MicroBatchInput& input, const at::Tensor& hidden,
                          loss::OutputGradients& gradients) {
      return models_.distiller->AddGradients(distillation, input, hidden, rows_.distillation,
                                             gradients, distilled);
    };
  }
  TANDEM_ASSIGN_OR_RETURN(const training::RouterSums routers,
                          AddGradients(models_, rows_, rows_.sequences.all(), update_loss, report));
  TANDEM_RETURN_IF_ERROR(evaluator.Reduce(models_.core.reduction()));
  report.metrics["loss/total"] = evaluator.loss();
  report.metrics["policy/entropy"] = evaluator.mean_entropy();
  report.metrics["policy/weighted_tokens"] = static_cast<double>(evaluator.tokens());
  if (distillation.is_on()) {
    TANDEM_RETURN_IF_ERROR(distilled.Reduce(models_.core.reduction()));
    AddDistillationMetrics(distilled, rows_.distillation, /*updates=*/1, report.metrics);
  }
  AddRouterMetrics(routers, routers.Loss(models_.core.router_losses()), report.metrics);
  return absl::OkStatus();
}

}  // namespace tandem::trainer
