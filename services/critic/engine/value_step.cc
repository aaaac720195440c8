#include "services/critic/engine/value_step.h"

#include <cstddef>

#include "absl/strings/str_cat.h"
#include "common/base/errors/error.h"
#include "common/base/errors/field_check.h"
#include "common/base/errors/status_macros.h"

namespace tandem::critic {
namespace {

absl::Status CheckSample(const ValueSample& sample, const training::SequenceLimits& limits) {
  TANDEM_RETURN_IF_ERROR(
      training::CheckSequence(sample.prompt_token_ids, sample.response_token_ids, limits));
  const size_t length = sample.response_token_ids.size();
  if (!sample.weights.empty()) {
    return training::CheckPerToken("weights", sample.weights, length + 1);
  }
  TANDEM_RETURN_IF_ERROR(training::CheckPerToken("old_values", sample.old_values, length));
  TANDEM_RETURN_IF_ERROR(training::CheckPerToken("returns", sample.returns, length));
  if (sample.loss_mask.empty()) return absl::OkStatus();
  if (sample.loss_mask.size() != length) {
    return InvalidField("loss_mask", absl::StrCat("has ", sample.loss_mask.size(), " entries for ",
                                                  length, " response tokens"));
  }
  for (size_t t = 0; t < length; ++t) {
    if (sample.loss_mask[t] > 1) {
      return InvalidField(absl::StrCat("loss_mask[", t, "]"), "must be 0 or 1");
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckTrainStep(const TrainStepRequest& request, const training::SequenceLimits& limits,
                            int64_t max_samples) {
  TANDEM_RETURN_IF_ERROR(CheckAtLeast("value_clip", request.value_clip, 0));
  TANDEM_RETURN_IF_ERROR(training::CheckUpdateOptions(request.updates));
  if (request.samples.empty()) return InvalidField("samples", "must hold at least one sample");
  if (static_cast<int64_t>(request.samples.size()) > max_samples) {
    return FieldError(absl::StatusCode::kOutOfRange, "samples",
                      absl::StrCat("has ", request.samples.size(), " samples, at most ",
                                   max_samples, " are allowed"));
  }
  const bool weighted = HasWeights(request);
  if (weighted && request.updates.num_mini_batches * request.updates.num_epochs > 1) {
    return InvalidField(request.updates.num_mini_batches > 1 ? "num_mini_batches" : "num_epochs",
                        "must be 1 with weights, the derivatives at the weights of one update");
  }
  bool any = weighted;
  for (size_t i = 0; i < request.samples.size(); ++i) {
    const ValueSample& sample = request.samples[i];
    TANDEM_RETURN_IF_ERROR(
        PrependFieldPath(absl::StrCat("samples[", i, "]"), CheckSample(sample, limits)));
    if (sample.weights.empty() == weighted) {
      return InvalidField(absl::StrCat("samples[", i, "].weights"),
                          "all samples of a step must have weights, or none");
    }
    if (weighted) continue;
    for (size_t t = 0; t < sample.response_token_ids.size(); ++t) any |= Counts(sample, t);
  }
  if (!any) return InvalidField("samples", "no token counts in the loss");
  return absl::OkStatus();
}

}  // namespace tandem::critic
