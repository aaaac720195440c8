#include "services/trainer/engine/steps/policy_step.h"

#include <ATen/core/Tensor.h>

#include <utility>

#include "common/base/errors/error.h"
#include "common/base/errors/status_macros.h"
#include "common/loss/logits/fused_output_loss.h"
#include "services/trainer/engine/auxiliary/critic_advantages.h"
#include "services/trainer/engine/auxiliary/sample_images.h"
#include "services/trainer/engine/steps/rollout_correction.h"
#include "services/trainer/engine/steps/row_passes.h"

namespace tandem::trainer {
namespace {

constexpr char kRejectedSkipReason[] =
    "every token with a weight was rejected: old_logprobs and the behaviour policy are too far "
    "apart for rejection_upper and rejection_lower";

constexpr char kStaleSkipReason[] =
    "every sample is older than max_staleness allows, and stale_samples drops those";

// Says why no token of the batch has a weight.
const char* NoWeightReason(const PolicyBatch& batch) {
  size_t cut = 0;
  for (const PolicySample& sample : batch.samples) {
    cut += IsMasked(sample, batch.objective) ? 1 : 0;
  }
  if (cut == batch.samples.size()) {
    return "no token of the batch has weight: every response was cut by length, and "
           "mask_truncated_completions leaves those out";
  }
  if (cut == 0) {
    return "no token of the batch has weight: every response token was written by the junior, and "
           "junior_token_loss_weight is 0";
  }
  return "no token of the batch has weight: responses that were cut by length are left out by "
         "mask_truncated_completions, the junior wrote every token of the others, and "
         "junior_token_loss_weight is 0";
}

PolicyStep::Updates Skip(const char* reason, StepReport& report) {
  report.skipped = true;
  report.skip_reason = reason;
  return {};
}

}  // namespace

absl::StatusOr<PolicyStep::Updates> PolicyStep::Prepare(const CallScope& call, StepReport& report) {
  TANDEM_RETURN_IF_ERROR(CheckPolicyBatch(*batch_, limits_));
  TANDEM_RETURN_IF_ERROR(CheckImages());
  DropStaleSamples(report);
  if (batch_->samples.empty()) return Skip(kStaleSkipReason, report);

  absl::StatusOr<loss::LossScales> scales = PolicyScales(*batch_);
  if (!scales.ok()) return PrependFieldPath("policy", scales.status());
  AddBatchMetrics(*batch_,
                  models_.boundaries == nullptr ? nullptr : &models_.boundaries->sentence(),
                  report.metrics);
  rows_ = PolicyRows(*batch_, *scales);
  TANDEM_ASSIGN_OR_RETURN(const SampleImages images,
                          ImagesOf(models_.core, *batch_, request_.blobs));
  rows_.sequences.SetImages(images);
  if (!HasRows(rows_.sequences.all())) return Skip(NoWeightReason(*batch_), report);
  TANDEM_RETURN_IF_ERROR(AddLogProbs());
  TANDEM_RETURN_IF_ERROR(CorrectForRollout(*batch_, rows_, report.metrics));
  if (!HasRows(rows_.sequences.all())) return Skip(kRejectedSkipReason, report);
  TANDEM_RETURN_IF_ERROR(AddAdvantages(call, report.metrics));
  TANDEM_RETURN_IF_ERROR(MakeEvaluator());

  Updates updates;
  for (int64_t epoch = 0; epoch < objective().updates.num_epochs; ++epoch) {
    for (const training::MiniBatch& range : MiniBatches(*batch_)) {
      if (!HasRows(range)) continue;
      updates.emplace_back(
          [this, range](StepReport& of_update) { return AddUpdate(range, of_update); });
    }
  }
  return updates;
}

absl::Status PolicyStep::CheckImages() const {
  TANDEM_ASSIGN_OR_RETURN(const SampleImages images,
                          ImagesOf(models_.core, *batch_, request_.blobs));
  if (HasReferenceKl(objective()) && objective().reference_logprobs == ReferenceLogprobs::kModel) {
    TANDEM_RETURN_IF_ERROR(
        CheckTakesImages("reference_model", *models_.reference, models_.core, images));
  }
  if (const Teacher junior = teacher(); junior.is_on() && junior.model != nullptr) {
    TANDEM_RETURN_IF_ERROR(CheckTakesImages("junior_model", *junior.model, models_.core, images));
  }
  if (objective().distillation.reads_model()) {
    return CheckTakesImages("teacher_model", *models_.teacher, models_.core, images);
  }
  return absl::OkStatus();
}

void PolicyStep::DropStaleSamples(StepReport& report) {
  const size_t sent = batch_->samples.size();
  if (objective().stale_samples == StaleSamples::kDrop) {
    batch_ = &fresh_.emplace(WithoutStale(*batch_, limits_));
  }
  report.metrics["policy/dropped_samples"] = static_cast<double>(sent - batch_->samples.size());
}

absl::Status PolicyStep::AddLogProbs() {
  // A single update computes these log-probabilities itself.
  const bool several = objective().updates.num_mini_batches * objective().updates.num_epochs > 1;
  const bool before = several || PenalisesReward(objective()) || RejectsTokens(objective()) ||
                      objective().importance_sampling_batch_normalize;
  if (objective().old_logprobs == OldLogprobs::kRecomputed && before) {
    TANDEM_ASSIGN_OR_RETURN(rows_.tokens.old_logprobs, SeniorLogProbs(models_, rows_));
  }
  if (HasReferenceKl(objective()) && objective().reference_logprobs == ReferenceLogprobs::kModel) {
    TANDEM_ASSIGN_OR_RETURN(rows_.tokens.reference, ReferenceLogProbs(models_, rows_));
  }
  return absl::OkStatus();
}

absl::Status PolicyStep::AddAdvantages(const CallScope& call, Metrics& metrics) {
  TokenNumbers penalties;
  if (PenalisesReward(objective())) {
    std::vector<double> kl = ReferenceKl(objective(), rows_.tokens);
    AddRewardKlMetrics(kl, *batch_, metrics);
    for (double& x : kl) x *= objective().loss.kl_coefficient;
    penalties = OfTokens(kl, *batch_, rows_);
  }
  TANDEM_ASSIGN_OR_RETURN(const Advantages advantages,
                          objective().advantage_estimator == AdvantageEstimator::kGae
                              ? CriticAdvantages(models_.core, *critic_, call, request_, *batch_,
                                                 penalties, metrics, critic_seconds_)
                              : PolicyAdvantages(*batch_, nullptr, penalties));
  rows_.tokens.advantages = OfRows(advantages.advantages, *batch_, rows_);
  return absl::OkStatus();
}

absl::Status PolicyStep::MakeEvaluator() {
  loss::PolicyLossOptions options = objective().loss;
  if (!HasLossKl(objective())) {
    options.kl_estimator = loss::KlEstimator::kNone;
  }
  TANDEM_ASSIGN_OR_RETURN(loss::PolicyLossEvaluator evaluator,
                          loss::PolicyLossEvaluator::Create(options, rows_.tokens));
  evaluator_.emplace(std::move(evaluator));
  return absl::OkStatus();
}

bool PolicyStep::HasRows(const training::MiniBatch& range) const {
  return rows_.sequences.Rows(range).size() > 0 ||
         (rows_.has_taught() && rows_.taught.sequences.Rows(range).size() > 0);
}

absl::Status PolicyStep::AddUpdate(const training::MiniBatch& range, StepReport& report) {
  // Copies, so that an update that is left out reports nothing.
  loss::PolicyLossEvaluator evaluator = *evaluator_;
  TeacherKlSums teacher_kl = teacher_kl_;
  DistillationSums distillation = distillation_;
  distillation.teachers.resize(rows_.distillation.names.size());
  UpdateLoss update_loss = {
      .evaluate = [&](auto... arguments) { return evaluator.Evaluate(arguments...); },
      // A micro-batch holds whole sequences.
      .mode = evaluator.needs_sequences() ? loss::LossMode::kRecompute : loss::LossMode::kAuto};
  const bool distils = objective().distillation.is_on();
  if (rows_.has_taught() || distils) {
    update_loss.add = [&](const training::MicroBatchInput& input, const at::Tensor& hidden,
                          loss::OutputGradients& gradients) -> absl::Status {
      if (distils) {
        TANDEM_RETURN_IF_ERROR(models_.distiller->AddGradients(
            objective().distillation, input, hidden, rows_.distillation, gradients, distillation));
      }
      if (!rows_.has_taught()) return absl::OkStatus();
      return models_.teacher_kl->AddGradients(
          teacher(), training::SelectRows(input.batch, rows_.taught.sequences, input.sequences),
          hidden, rows_.taught, gradients, teacher_kl);
    };
  }
  TANDEM_ASSIGN_OR_RETURN(const training::RouterSums routers,
                          AddGradients(models_, rows_, range, update_loss, report));
  // The report has the sums of all ranks; each rank goes on with its own.
  loss::PolicyLossEvaluator all = evaluator;
  TeacherKlSums all_teacher_kl = teacher_kl;
  DistillationSums all_distillation = distillation;
  TANDEM_RETURN_IF_ERROR(all.Reduce(models_.core.reduction()));
  if (rows_.has_taught()) {
    TANDEM_RETURN_IF_ERROR(all_teacher_kl.Reduce(models_.core.reduction()));
  }
  if (distils) TANDEM_RETURN_IF_ERROR(all_distillation.Reduce(models_.core.reduction()));
  evaluator_ = std::move(evaluator);
  teacher_kl_ = teacher_kl;
  distillation_ = std::move(distillation);
  routers_.Add(routers);
  router_loss_ += routers.Loss(models_.core.router_losses());
  ++updates_;
  const loss::PolicyMetrics metrics = all.Metrics();
  if (!initial_mismatch_.has_value()) {
    initial_mismatch_ = {.senior = metrics.senior_mismatch, .junior = metrics.junior_mismatch};
  }
  AddPolicyMetrics(metrics, updates_, HasLossKl(objective()), report.metrics);
  AddMismatchMetrics(*initial_mismatch_, report.metrics);
  if (rows_.has_taught()) AddJuniorKlMetrics(all_teacher_kl, updates_, report.metrics);
  if (distils)
    AddDistillationMetrics(all_distillation, rows_.distillation, updates_, report.metrics);
  AddRouterMetrics(routers_, router_loss_ / static_cast<double>(updates_), report.metrics);
  return absl::OkStatus();
}

}  // namespace tandem::trainer
