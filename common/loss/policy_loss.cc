#include "common/loss/policy_loss.h"

#include <algorithm>
#include <cmath>
#include <cstddef>

#include "absl/strings/str_cat.h"
#include "common/base/errors/error.h"
#include "common/base/errors/field_check.h"
#include "common/base/errors/not_finite.h"
#include "common/base/errors/status_macros.h"

namespace tandem::loss {
namespace {

// A clamped log-ratio and whether its gradient passes.
struct LogRatio {
  explicit LogRatio(double raw)
      : value(std::clamp(raw, -kMaxLogRatio, kMaxLogRatio)), open(std::abs(raw) <= kMaxLogRatio) {}
  double value;
  bool open;
};

struct Ratio {
  double plain;
  double clipped;
};

Ratio RatioOf(const PolicyLossOptions& options, const LogRatio& log_ratio) {
  const double ratio = std::exp(log_ratio.value);
  return {
      .plain = ratio,
      .clipped = std::clamp(ratio, 1.0 - options.clip_ratio_low, 1.0 + options.clip_ratio_high)};
}

struct LossTerm {
  double value = 0;
  double gradient = 0;  // by the log-ratio (or by logp, which is the same)
  bool clipped = false;
};

LossTerm PpoClip(const PolicyLossOptions& options, const LogRatio& log_ratio, double advantage) {
  const auto [ratio, clipped_ratio] = RatioOf(options, log_ratio);
  const double plain = -advantage * ratio;
  LossTerm term;
  term.clipped = -advantage * clipped_ratio > plain;
  term.value = term.clipped ? -advantage * clipped_ratio : plain;
  term.gradient = term.clipped || !log_ratio.open ? 0.0 : plain;
  if (options.dual_clip > 0 && advantage < 0 && -advantage * options.dual_clip < term.value) {
    term.value = -advantage * options.dual_clip;
    term.gradient = 0;
    term.clipped = true;
  }
  return term;
}

LossTerm Cispo(const PolicyLossOptions& options, const LogRatio& log_ratio, double advantage,
               double logprob) {
  const auto [ratio, clipped_ratio] = RatioOf(options, log_ratio);
  return {.value = -clipped_ratio * advantage * logprob,
          .gradient = -clipped_ratio * advantage,
          .clipped = clipped_ratio != ratio};
}

// Returns log q, the log-probability with which the writer drew the token.
double LogDrawn(const PolicyTokens& tokens, size_t row) {
  const double keep = tokens.log_keep_mass.empty() ? 0.0 : tokens.log_keep_mass[row];
  return tokens.behaviour[row] - keep;
}

// Returns the log of the importance weight for an old log-probability.
double LogWeight(const PolicyTokens& tokens, size_t row, double old) {
  return old - LogDrawn(tokens, row);
}

// Whether k3_cap may be set with the estimator; with kNone it has no effect.
bool AllowsK3Cap(KlEstimator estimator) {
  return estimator == KlEstimator::kK3 || estimator == KlEstimator::kK3GradientK2 ||
         estimator == KlEstimator::kNone;
}

LossTerm KlTerm(KlEstimator estimator, double k3_cap, double logprob, double reference) {
  const LogRatio d(logprob - reference);
  const double plain_k3 = std::expm1(-d.value) + d.value;
  const bool cut = k3_cap > 0 && plain_k3 > k3_cap;
  const double k3 = cut ? k3_cap : plain_k3;
  LossTerm term;
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
      term = {.value = k3, .gradient = cut ? 0.0 : -std::expm1(-d.value)};
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

LossTerm TimesRatio(const LossTerm& term, const LogRatio& log_ratio) {
  const double ratio = std::exp(log_ratio.value);
  return {.value = ratio * term.value,
          .gradient = ratio * (term.gradient + (log_ratio.open ? term.value : 0.0))};
}

absl::Status CheckLength(const char* name, size_t actual, size_t expected) {
  if (actual == expected) return absl::OkStatus();
  return InvalidField(name, absl::StrCat("has ", actual, " entries, expected ", expected));
}

}  // namespace

double LogImportanceWeight(const PolicyTokens& tokens, size_t row) {
  return LogWeight(tokens, row, tokens.old_logprobs[row]);
}

double BoundedImportanceWeight(const PolicyLossOptions& options, double log_weight) {
  const double weight = std::exp(LogRatio(log_weight).value);
  const double inside =
      std::clamp(weight, options.importance_sampling_floor, options.importance_sampling_cap);
  const bool masked = options.importance_sampling_mode == ImportanceSamplingMode::kMask;
  return masked && inside != weight ? 0.0 : inside;
}

double KlEstimate(KlEstimator estimator, double k3_cap, double logprob, double reference) {
  return KlTerm(estimator, k3_cap, logprob, reference).value;
}

absl::Status CheckPolicyLossOptions(const PolicyLossOptions& options) {
  TANDEM_RETURN_IF_ERROR(CheckInRange("clip_ratio_low", options.clip_ratio_low, 0, 1));
  TANDEM_RETURN_IF_ERROR(
      CheckInRange("clip_ratio_high", options.clip_ratio_high, 0, kMaxCoefficient));
  if (options.dual_clip != 0 && !(options.dual_clip > 1 && options.dual_clip <= kMaxCoefficient)) {
    return InvalidField("dual_clip", absl::StrCat("must be 0 (off) or in (1, ", kMaxCoefficient,
                                                  "], got ", options.dual_clip));
  }
  if (options.dual_clip != 0 && options.kind == PolicyLossKind::kCispo) {
    return InvalidField("dual_clip", "must be 0 with CISPO, which has no minimum to bound");
  }
  TANDEM_RETURN_IF_ERROR(
      CheckInRange("kl_coefficient", options.kl_coefficient, 0, kMaxCoefficient));
  TANDEM_RETURN_IF_ERROR(CheckInRange("k3_cap", options.k3_cap, 0, kMaxCoefficient));
  if (options.k3_cap > 0 && !AllowsK3Cap(options.kl_estimator)) {
    return InvalidField("k3_cap", "must be 0 with a kl_estimator that is not K3 or K3_GRADIENT_K2");
  }
  if (options.kl_importance_correction && options.kind == PolicyLossKind::kGspo) {
    return InvalidField("kl_importance_correction",
                        "must be false with GSPO, which has no ratio per token");
  }
  TANDEM_RETURN_IF_ERROR(CheckInRange("entropy_coefficient", options.entropy_coefficient,
                                      -kMaxCoefficient, kMaxCoefficient));
  TANDEM_RETURN_IF_ERROR(
      CheckInRange("importance_sampling_cap", options.importance_sampling_cap, 0, kMaxCoefficient));
  TANDEM_RETURN_IF_ERROR(CheckInRange("off_policy_mask_threshold",
                                      options.off_policy_mask_threshold, 0, kMaxCoefficient));
  const double floor = options.importance_sampling_floor;
  if (floor >= 0 && floor <= options.importance_sampling_cap) return absl::OkStatus();
  return InvalidField(
      "importance_sampling_floor",
      absl::StrCat("must be at most importance_sampling_cap, which is ",
                   options.importance_sampling_cap, ", and not negative; got ", floor));
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
  if (options.importance_sampling_cap > 0 || options.off_policy_mask_threshold > 0 ||
      !tokens.behaviour.empty()) {
    TANDEM_RETURN_IF_ERROR(CheckLength("behaviour", tokens.behaviour.size(), rows));
    TANDEM_RETURN_IF_ERROR(CheckLength("authorship", tokens.authorship.size(), rows));
  }
  if (!tokens.importance_weights.empty()) {
    TANDEM_RETURN_IF_ERROR(
        CheckLength("importance_weights", tokens.importance_weights.size(), rows));
  }
  if (!tokens.log_keep_mass.empty()) {
    TANDEM_RETURN_IF_ERROR(CheckLength("log_keep_mass", tokens.log_keep_mass.size(), rows));
  }
  PolicyLossEvaluator evaluator(options, tokens);
  if (evaluator.needs_sequences()) {
    std::vector<int64_t>& begins = evaluator.sequence_begins_;
    begins.push_back(0);
    for (const int64_t count : tokens.sequence_rows) {
      if (count > 0) begins.push_back(begins.back() + count);
    }
    TANDEM_RETURN_IF_ERROR(CheckLength("sequence_rows", static_cast<size_t>(begins.back()), rows));
    evaluator.sequence_weights_.resize(rows);
    evaluator.off_policy_.resize(rows);
    evaluator.sequence_terms_.resize(rows);
  }
  return evaluator;
}

double PolicyLossEvaluator::OldLogprob(size_t row, double logprob) const {
  return tokens_->old_logprobs.empty() ? logprob : tokens_->old_logprobs[row];
}

// The importance weight of the policy term is a constant for the gradient.
double PolicyLossEvaluator::ImportanceWeight(size_t row, double logprob) const {
  if (options_.importance_sampling_cap == 0) return 1;
  if (!tokens_->importance_weights.empty()) return tokens_->importance_weights[row];
  if (weighs_sequences()) return sequence_weights_[row];
  return BoundedImportanceWeight(options_, LogWeight(*tokens_, row, OldLogprob(row, logprob)));
}

double PolicyLossEvaluator::PolicyWeight(size_t row, double logprob) const {
  const bool masked = masks_sequences() && off_policy_[row] != 0 && tokens_->advantages[row] < 0;
  return masked ? 0 : ImportanceWeight(row, logprob);
}

PolicyLossEvaluator::Term PolicyLossEvaluator::PolicyTerm(size_t row, double logprob) const {
  if (options_.kind == PolicyLossKind::kGspo) return sequence_terms_[row];
  const LogRatio log_ratio(logprob - OldLogprob(row, logprob));
  const double advantage = tokens_->advantages[row];
  const LossTerm term = options_.kind == PolicyLossKind::kCispo
                            ? Cispo(options_, log_ratio, advantage, logprob)
                            : PpoClip(options_, log_ratio, advantage);
  const double weight = PolicyWeight(row, logprob);
  return {.log_ratio = log_ratio.value,
          .value = weight * term.value,
          .gradient = tokens_->scales[row] * weight * term.gradient,
          .clipped = term.clipped,
          .masked = weight == 0};
}

void PolicyLossEvaluator::WeighSequence(size_t begin, absl::Span<const double> logprobs) {
  double log_weight = 0;
  for (size_t i = 0; i < logprobs.size(); ++i) {
    const size_t row = begin + i;
    log_weight += LogWeight(*tokens_, row, OldLogprob(row, logprobs[i]));
  }
  std::fill_n(sequence_weights_.begin() + static_cast<int64_t>(begin), logprobs.size(),
              BoundedImportanceWeight(options_, log_weight));
}

void PolicyLossEvaluator::MaskSequence(size_t begin, absl::Span<const double> logprobs) {
  double sum = 0;
  for (size_t i = 0; i < logprobs.size(); ++i) sum += LogDrawn(*tokens_, begin + i) - logprobs[i];
  const double mean = sum / static_cast<double>(logprobs.size());
  std::fill_n(off_policy_.begin() + static_cast<int64_t>(begin), logprobs.size(),
              mean > options_.off_policy_mask_threshold);
}

// The loss depends on the log-probs of a sequence only through the sequence's ratio, whose
// logarithm is their mean.
void PolicyLossEvaluator::SetGspoTerms(size_t begin, absl::Span<const double> logprobs) {
  const auto count = static_cast<double>(logprobs.size());
  double sum = 0;
  for (size_t i = 0; i < logprobs.size(); ++i) {
    sum += logprobs[i] - OldLogprob(begin + i, logprobs[i]);
  }
  const LogRatio log_ratio(sum / count);
  double gradient = 0;
  for (size_t i = 0; i < logprobs.size(); ++i) {
    const size_t row = begin + i;
    const double weight = PolicyWeight(row, logprobs[i]);
    const LossTerm term = PpoClip(options_, log_ratio, tokens_->advantages[row]);
    sequence_terms_[row] = {.log_ratio = log_ratio.value,
                            .value = weight * term.value,
                            .clipped = term.clipped,
                            .masked = weight == 0};
    gradient += tokens_->scales[row] * weight * term.gradient;
  }
  for (size_t i = 0; i < logprobs.size(); ++i) {
    sequence_terms_[begin + i].gradient = gradient / count;
  }
}

absl::Status PolicyLossEvaluator::SetSequences(int64_t first_row,
                                               absl::Span<const double> logprobs) {
  const int64_t last_row = first_row + static_cast<int64_t>(logprobs.size());
  auto next = std::lower_bound(sequence_begins_.begin(), sequence_begins_.end(), first_row);
  if (next == sequence_begins_.end() || *next != first_row ||
      !std::binary_search(next, sequence_begins_.end(), last_row)) {
    return absl::InternalError("the rows are not whole sequences");
  }
  for (int64_t begin = first_row; begin < last_row;) {
    const int64_t end = *++next;
    const auto own =
        logprobs.subspan(static_cast<size_t>(begin - first_row), static_cast<size_t>(end - begin));
    if (weighs_sequences()) WeighSequence(static_cast<size_t>(begin), own);
    if (masks_sequences()) MaskSequence(static_cast<size_t>(begin), own);
    if (options_.kind == PolicyLossKind::kGspo) SetGspoTerms(static_cast<size_t>(begin), own);
    begin = end;
  }
  return absl::OkStatus();
}

absl::Status PolicyLossEvaluator::Evaluate(int64_t first_row, absl::Span<const double> logprobs,
                                           absl::Span<const double> entropies,
                                           absl::Span<double> logprob_coefficients,
                                           absl::Span<double> entropy_coefficients) {
  if (needs_sequences()) TANDEM_RETURN_IF_ERROR(SetSequences(first_row, logprobs));
  const auto first = static_cast<size_t>(first_row);
  for (size_t i = 0; i < logprobs.size(); ++i) {
    const size_t t = first + i;
    const double logprob = logprobs[i];
    const double scale = tokens_->scales[t];
    const Term policy = PolicyTerm(t, logprob);
    const LogRatio log_ratio(logprob - OldLogprob(t, logprob));
    LossTerm kl;
    if (options_.kl_estimator != KlEstimator::kNone) {
      kl = KlTerm(options_.kl_estimator, options_.k3_cap, logprob, tokens_->reference[t]);
      if (options_.kl_importance_correction) kl = TimesRatio(kl, log_ratio);
    }
    const double beta = options_.kl_coefficient;
    logprob_coefficients[i] = policy.gradient + scale * beta * kl.gradient;
    entropy_coefficients[i] = -scale * options_.entropy_coefficient;
    if (!std::isfinite(logprob) || !std::isfinite(entropies[i]) ||
        !std::isfinite(logprob_coefficients[i])) {
      return NotFiniteError(absl::StrCat("row ", t, " of the loss is not finite (log-prob ",
                                         logprob, ", entropy ", entropies[i], ", coefficient ",
                                         logprob_coefficients[i], ")"));
    }

    sums_.loss_policy += scale * policy.value;
    sums_.loss_kl += scale * beta * kl.value;
    sums_.loss_entropy += entropy_coefficients[i] * entropies[i];
    sums_.tokens += 1;
    sums_.clip_fraction += policy.clipped;
    sums_.masked_fraction += policy.masked;
    sums_.ppo_kl -= log_ratio.value;
    sums_.kl_to_ref += kl.value;
    sums_.mean_ratio += std::exp(policy.log_ratio);
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
                       &metrics.mean_ratio, &metrics.mean_entropy, &metrics.masked_fraction}) {
    *mean /= count;
  }
  metrics.senior_mismatch = senior_.Finish();
  metrics.junior_mismatch = junior_.Finish();
  return metrics;
}

absl::Status PolicyLossEvaluator::Reduce(MetricReduction reduce) {
  return ReduceMetrics(reduce,
                       {&sums_.loss_policy,
                        &sums_.loss_kl,
                        &sums_.loss_entropy,
                        &sums_.tokens,
                        &sums_.clip_fraction,
                        &sums_.ppo_kl,
                        &sums_.kl_to_ref,
                        &sums_.mean_ratio,
                        &sums_.mean_entropy,
                        &sums_.masked_fraction,
                        &senior_.count,
                        &senior_.k1,
                        &senior_.k3,
                        &senior_.ratio,
                        &senior_.ratio_squared,
                        &junior_.count,
                        &junior_.k1,
                        &junior_.k3,
                        &junior_.ratio,
                        &junior_.ratio_squared},
                       {&senior_.max_abs, &junior_.max_abs});
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
