#include "common/loss/policy_loss.h"

#include <algorithm>
#include <cmath>
#include <cstddef>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/field_check.h"
#include "common/base/status_macros.h"

namespace tandem::loss {
namespace {

// A clamped log-ratio and whether its gradient passes.
struct LogRatio {
  explicit LogRatio(double raw)
      : value(std::clamp(raw, -kMaxLogRatio, kMaxLogRatio)), open(std::abs(raw) <= kMaxLogRatio) {}
  double value;
  bool open;
};

struct Term {
  double value = 0;
  double gradient = 0;  // by logp
  bool clipped = false;
};

Term PpoClip(const PolicyLossOptions& options, const LogRatio& log_ratio, double advantage) {
  const double ratio = std::exp(log_ratio.value);
  const double cut = std::clamp(ratio, 1.0 - options.clip_ratio_low, 1.0 + options.clip_ratio_high);
  const double plain = -advantage * ratio;
  Term term;
  term.clipped = -advantage * cut > plain;
  term.value = term.clipped ? -advantage * cut : plain;
  term.gradient = term.clipped || !log_ratio.open ? 0.0 : plain;
  if (options.dual_clip > 0 && advantage < 0 && -advantage * options.dual_clip < term.value) {
    term.value = -advantage * options.dual_clip;
    term.gradient = 0;
    term.clipped = true;
  }
  return term;
}

Term KlTerm(KlEstimator estimator, double logprob, double reference) {
  const LogRatio d(logprob - reference);
  const double k3 = std::expm1(-d.value) + d.value;
  Term term;
  switch (estimator) {
    case KlEstimator::kNone:
      return term;
    case KlEstimator::kK1:
      term = {.value = d.value, .gradient = 1.0};
      break;
    case KlEstimator::kK2:
      term = {.value = 0.5 * d.value * d.value, .gradient = d.value};
      break;
    case KlEstimator::kK3:
      term = {.value = k3, .gradient = -std::expm1(-d.value)};
      break;
    case KlEstimator::kK1GradientK2:
      term = {.value = d.value, .gradient = d.value};
      break;
    case KlEstimator::kK3GradientK2:
      term = {.value = k3, .gradient = d.value};
      break;
  }
  if (!d.open) term.gradient = 0;
  return term;
}

absl::Status CheckLength(const char* name, size_t actual, size_t expected) {
  if (actual == expected) return absl::OkStatus();
  return InvalidField(name, absl::StrCat("has ", actual, " entries, expected ", expected));
}

}  // namespace

absl::Status CheckPolicyLossOptions(const PolicyLossOptions& options) {
  if (options.kind != PolicyLossKind::kPpoClip) {
    return FieldError(absl::StatusCode::kUnimplemented, "loss_kind", "only PPO_CLIP is there yet");
  }
  TANDEM_RETURN_IF_ERROR(CheckInRange("clip_ratio_low", options.clip_ratio_low, 0, 1));
  TANDEM_RETURN_IF_ERROR(
      CheckInRange("clip_ratio_high", options.clip_ratio_high, 0, kMaxCoefficient));
  if (options.dual_clip != 0 && !(options.dual_clip > 1 && options.dual_clip <= kMaxCoefficient)) {
    return InvalidField("dual_clip", absl::StrCat("must be 0 (off) or in (1, ", kMaxCoefficient,
                                                  "], got ", options.dual_clip));
  }
  TANDEM_RETURN_IF_ERROR(
      CheckInRange("kl_coefficient", options.kl_coefficient, 0, kMaxCoefficient));
  TANDEM_RETURN_IF_ERROR(CheckInRange("entropy_coefficient", options.entropy_coefficient,
                                      -kMaxCoefficient, kMaxCoefficient));
  return CheckInRange("importance_sampling_cap", options.importance_sampling_cap, 0,
                      kMaxCoefficient);
}

absl::StatusOr<PolicyLossEvaluator> PolicyLossEvaluator::Create(const PolicyLossOptions& options,
                                                                const PolicyTokens& tokens) {
  TANDEM_RETURN_IF_ERROR(CheckPolicyLossOptions(options));
  const size_t rows = tokens.advantages.size();
  if (!tokens.old_logprobs.empty()) {
    TANDEM_RETURN_IF_ERROR(CheckLength("old_logprobs", tokens.old_logprobs.size(), rows));
  }
  TANDEM_RETURN_IF_ERROR(CheckLength("scales", tokens.scales.size(), rows));
  if (options.kl_estimator != KlEstimator::kNone || !tokens.reference.empty()) {
    TANDEM_RETURN_IF_ERROR(CheckLength("reference", tokens.reference.size(), rows));
  }
  if (options.importance_sampling_cap > 0 || !tokens.behaviour.empty()) {
    TANDEM_RETURN_IF_ERROR(CheckLength("behaviour", tokens.behaviour.size(), rows));
    TANDEM_RETURN_IF_ERROR(CheckLength("authorship", tokens.authorship.size(), rows));
  }
  if (!tokens.log_keep_mass.empty()) {
    TANDEM_RETURN_IF_ERROR(CheckLength("log_keep_mass", tokens.log_keep_mass.size(), rows));
  }
  return PolicyLossEvaluator(options, tokens);
}

absl::Status PolicyLossEvaluator::Evaluate(int64_t first_row, absl::Span<const double> logprobs,
                                           absl::Span<const double> entropies,
                                           absl::Span<double> logprob_coefficients,
                                           absl::Span<double> entropy_coefficients) {
  const auto first = static_cast<size_t>(first_row);
  for (size_t i = 0; i < logprobs.size(); ++i) {
    const size_t t = first + i;
    const double logprob = logprobs[i];
    const double scale = tokens_->scales[t];
    const double old_logprob = tokens_->old_logprobs.empty() ? logprob : tokens_->old_logprobs[t];
    const LogRatio log_ratio(logprob - old_logprob);

    Term policy = PpoClip(options_, log_ratio, tokens_->advantages[t]);
    if (options_.importance_sampling_cap > 0) {
      const double keep = tokens_->log_keep_mass.empty() ? 0.0 : tokens_->log_keep_mass[t];
      const LogRatio off(old_logprob - (tokens_->behaviour[t] - keep));
      const double weight = std::min(std::exp(off.value), options_.importance_sampling_cap);
      policy.value *= weight;
      policy.gradient *= weight;
    }
    Term kl;
    if (options_.kl_estimator != KlEstimator::kNone) {
      kl = KlTerm(options_.kl_estimator, logprob, tokens_->reference[t]);
    }
    const double beta = options_.kl_coefficient;
    logprob_coefficients[i] = scale * (policy.gradient + beta * kl.gradient);
    entropy_coefficients[i] = -scale * options_.entropy_coefficient;
    if (!std::isfinite(logprob) || !std::isfinite(entropies[i]) ||
        !std::isfinite(logprob_coefficients[i])) {
      return absl::InternalError(absl::StrCat("row ", t, " of the loss is not finite (log-prob ",
                                              logprob, ", entropy ", entropies[i], ", coefficient ",
                                              logprob_coefficients[i], ")"));
    }

    sums_.loss_policy += scale * policy.value;
    sums_.loss_kl += scale * beta * kl.value;
    sums_.loss_entropy += entropy_coefficients[i] * entropies[i];
    sums_.tokens += 1;
    sums_.clip_fraction += policy.clipped;
    sums_.ppo_kl -= log_ratio.value;
    sums_.kl_to_ref += kl.value;
    sums_.mean_ratio += std::exp(log_ratio.value);
    sums_.mean_entropy += entropies[i];
    if (!tokens_->behaviour.empty()) {
      (tokens_->authorship[t] ? senior_ : junior_).Add(logprob, tokens_->behaviour[t]);
    }
  }
  return absl::OkStatus();
}

PolicyMetrics PolicyLossEvaluator::Metrics() const {
  PolicyMetrics metrics = sums_;
  metrics.loss_total = metrics.loss_policy + metrics.loss_kl + metrics.loss_entropy;
  const double count = std::max<double>(1.0, static_cast<double>(metrics.tokens));
  for (double* mean : {&metrics.clip_fraction, &metrics.ppo_kl, &metrics.kl_to_ref,
                       &metrics.mean_ratio, &metrics.mean_entropy}) {
    *mean /= count;
  }
  metrics.senior_mismatch = senior_.Finish();
  metrics.junior_mismatch = junior_.Finish();
  return metrics;
}

void PolicyLossEvaluator::MismatchSums::Add(double trainer, double behaviour) {
  const double raw = trainer - behaviour;
  const double d = LogRatio(raw).value;
  count += 1;
  k1 -= raw;
  k3 += std::expm1(d) - d;
  max_abs = std::max(max_abs, std::abs(raw));
  ratio += std::exp(d);
  ratio_squared += std::exp(2 * d);
}

Mismatch PolicyLossEvaluator::MismatchSums::Finish() const {
  if (count == 0) return {};
  const auto n = static_cast<double>(count);
  return {.count = count,
          .k1 = k1 / n,
          .k3 = k3 / n,
          .max_abs_logprob_diff = max_abs,
          .effective_sample_size = ratio * ratio / (n * ratio_squared)};
}

}  // namespace tandem::loss
