// The policy loss: its coefficients per token, from which gradients follow, and its report.
//
// The losses read the [N, V] logits only through the log-probability and the entropy of each row.
// So a loss is described by two numbers per token,
//   c_t = d loss / d logp_t   and   e_t = d loss / d entropy_t,
// which common/loss/logits/linear_cross_entropy.h turns into the gradient of the logits, chunk by
// chunk. Semantics: PPO (arXiv 1707.06347), asymmetric clip (DAPO, 2503.14476), dual clip
// (1912.09729), GSPO (2507.18071), CISPO (MiniMax-M1, 2506.13585), KL estimators k1-k3 (Schulman,
// "Approximating KL divergence"), truncated importance sampling (Yao et al. 2025) and its masked
// and sequence-level forms (richardli.xyz/rl-collapse), off-policy sequence mask (DeepSeek-V3.2,
// 2512.02556).
#ifndef TANDEM_COMMON_LOSS_POLICY_LOSS_H_
#define TANDEM_COMMON_LOSS_POLICY_LOSS_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/loss/metric_reduction.h"

namespace tandem::loss {

// A log-ratio with a larger magnitude is clamped to this, and its gradient is zero.
inline constexpr double kMaxLogRatio = 20.0;

// The policy term of a token with ratio r_t = exp(logp_t - logp_old_t) and advantage A_t, where
// clip(r) is r clamped to [1 - eps_low, 1 + eps_high].
enum class PolicyLossKind {
  kPpoClip,  // -min(r_t A_t, clip(r_t) A_t)
  kGspo,     // -min(s A_t, clip(s) A_t), s = exp(mean of log r over the sequence's rows)
  kCispo,    // -clip(r_t) A_t logp_t, without gradient through r_t
};

enum class KlEstimator {
  kNone,
  kK1,            // logp - ref
  kK2,            // (logp - ref)^2 / 2
  kK3,            // exp(ref - logp) - (ref - logp) - 1
  kK1GradientK2,  // the value of k1 with the gradient of k2
  kK3GradientK2,  // the value of k3 with the gradient of k2
};

// Whether the importance weight of a token is bounded, or the product over its sequence's rows.
enum class ImportanceSamplingLevel { kToken, kSequence };

// Whether an importance weight outside the bounds is set to the bound, or to 0.
enum class ImportanceSamplingMode { kTruncate, kMask };

// Returns the KL estimate of a token without its coefficient. The log-ratio is clamped, and k3 is
// at most `k3_cap` (0: no cap). Returns 0 for kNone.
double KlEstimate(KlEstimator estimator, double k3_cap, double logprob, double reference);

struct PolicyLossOptions {
  PolicyLossKind kind = PolicyLossKind::kPpoClip;
  double clip_ratio_low = 0.2;
  double clip_ratio_high = 0.2;
  // Bounds the loss of a token with A < 0 by -A * dual_clip. 0 is off, else it is > 1. Not for
  // CISPO.
  double dual_clip = 0;
  KlEstimator kl_estimator = KlEstimator::kNone;
  double kl_coefficient = 0;  // beta
  // Maximum of k3 of a token, 0 is off; beyond it kK3 has no gradient. Only for kK3 and
  // kK3GradientK2.
  double k3_cap = 0;
  // Whether the KL of a token is multiplied by its ratio r_t, with the gradient of both
  // (DeepSeek-V3.2, arXiv 2512.02556). Not for GSPO.
  bool kl_importance_correction = false;
  double entropy_coefficient = 0;  // subtracted: loss -= this * entropy
  // Bounds [floor, cap] of the importance weight exp(logp_old - log q), which multiplies the policy
  // term and is a constant for the gradient. log q = behaviour - log_keep_mass is the
  // log-probability with which the writer drew the token, after top-k, top-p and min-p. A cap of 0
  // is off.
  double importance_sampling_cap = 0;
  double importance_sampling_floor = 0;
  ImportanceSamplingLevel importance_sampling_level = ImportanceSamplingLevel::kToken;
  ImportanceSamplingMode importance_sampling_mode = ImportanceSamplingMode::kTruncate;
  // Masks the policy term of a token with A < 0 where the mean of log q - logp over the rows of its
  // sequence is above this. 0 is off.
  double off_policy_mask_threshold = 0;

  bool operator==(const PolicyLossOptions&) const = default;
};

// Maximum of coefficients and caps: far above any use, so that no term overflows.
inline constexpr double kMaxCoefficient = 1e9;

// INVALID_ARGUMENT with the field.
absl::Status CheckPolicyLossOptions(const PolicyLossOptions& options);

// The rows of the loss, in parallel vectors [N]. `reference` may be empty if the KL is off.
// `behaviour` is the log-prob that the writer recorded (the senior's or the junior's own); empty if
// unknown. If `old_logprobs` is empty, the log-probs being evaluated take its place: the ratio
// is 1.
struct PolicyTokens {
  std::vector<double> old_logprobs;  // logp_old of the ratio
  std::vector<double> advantages;
  std::vector<double> scales;  // w_t / Z_t (loss_scale.h)
  std::vector<double> reference = {};
  std::vector<double> behaviour = {};
  std::vector<double> log_keep_mass = {};  // empty: 0 everywhere
  std::vector<uint8_t> authorship = {};    // 1 senior, 0 junior
  // Number of rows of each sequence, in order, with sum N. Only a loss that needs_sequences() reads
  // it.
  std::vector<int64_t> sequence_rows = {};
  // Importance weights of the policy terms; empty: they follow from options, old_logprobs and
  // behaviour.
  std::vector<double> importance_weights = {};
};

// Returns the log of the importance weight old / q of a row, which has an old log-probability.
double LogImportanceWeight(const PolicyTokens& tokens, size_t row);
// Returns the weight within its bounds; a weight outside is truncated or masked.
double BoundedImportanceWeight(const PolicyLossOptions& options, double log_weight);

// The distance between the trainer's log-probs and those that the writer recorded. With
// d = trainer - behaviour: k1 = mean(-d), k3 = mean(exp(d) - d - 1), and the effective sample size
// as a fraction of n, (sum e^d)^2 / (n sum e^2d), which is 1 without mismatch.
struct Mismatch {
  int64_t count = 0;
  double k1 = 0;
  double k3 = 0;
  double max_abs_logprob_diff = 0;
  double effective_sample_size = 1;
};

// Report of the rows seen so far. Numbers marked "in the sum" are terms of the loss, with scale and
// coefficient; the others are plain means over the rows (tokens with w > 0).
struct PolicyMetrics {
  double loss_total = 0;    // in the sum
  double loss_policy = 0;   // in the sum
  double loss_kl = 0;       // in the sum
  double loss_entropy = 0;  // in the sum; negative for a bonus
  int64_t tokens = 0;
  double clip_fraction = 0;
  double ppo_kl = 0;      // mean(logp_old - logp)
  double kl_to_ref = 0;   // mean of the estimator, with its correction; 0 when off
  double mean_ratio = 0;  // mean of r
  double mean_entropy = 0;
  double masked_fraction = 0;  // rows whose policy term was set to 0
  Mismatch senior_mismatch;    // rows that the senior wrote
  Mismatch junior_mismatch;    // rows that the junior wrote; none when they weigh 0
};

// Evaluates rows, and sums over them in the order of the calls.
class PolicyLossEvaluator {
 public:
  // `tokens` must outlive the evaluator. INVALID_ARGUMENT for lengths that differ or missing
  // inputs.
  static absl::StatusOr<PolicyLossEvaluator> Create(const PolicyLossOptions& options,
                                                    const PolicyTokens& tokens);

  // Whether the coefficients of a row depend on the log-probs of its whole sequence (GSPO,
  // importance weights of sequences, the off-policy mask). Evaluate then takes only whole
  // sequences.
  bool needs_sequences() const {
    return options_.kind == PolicyLossKind::kGspo || weighs_sequences() || masks_sequences();
  }

  // Fills the coefficients of the rows [first_row, first_row + n), where n is the size of every
  // span, and adds the rows to the report. NotFiniteError for a log-prob, an entropy or a
  // coefficient; INTERNAL for an incomplete sequence where needs_sequences().
  absl::Status Evaluate(int64_t first_row, absl::Span<const double> logprobs,
                        absl::Span<const double> entropies, absl::Span<double> logprob_coefficients,
                        absl::Span<double> entropy_coefficients);

  PolicyMetrics Metrics() const;

  // Adds the sums of the evaluators of other rows of the same tokens: Metrics() is then that of one
  // evaluator of all rows. Call it on a copy if more rows will follow. Returns the error of
  // `reduce`.
  absl::Status Reduce(MetricReduction reduce);

 private:
  struct MismatchSums {
    int64_t count = 0;
    double k1 = 0, k3 = 0, max_abs = 0, ratio = 0, ratio_squared = 0;
    void Add(double trainer, double behaviour);
    Mismatch Finish() const;
  };

  // The policy term of a row.
  struct Term {
    double log_ratio = 0;  // log of the ratio that is clipped
    double value = 0;
    double gradient = 0;  // d loss / d logp of the row, with the scale
    bool clipped = false;
    bool masked = false;
  };

  PolicyLossEvaluator(const PolicyLossOptions& options, const PolicyTokens& tokens)
      : options_(options), tokens_(&tokens) {}
  bool weighs_sequences() const {
    return options_.importance_sampling_cap > 0 && tokens_->importance_weights.empty() &&
           options_.importance_sampling_level == ImportanceSamplingLevel::kSequence;
  }
  bool masks_sequences() const { return options_.off_policy_mask_threshold > 0; }
  double OldLogprob(size_t row, double logprob) const;
  double ImportanceWeight(size_t row, double logprob) const;
  // Returns what the policy term of a row is multiplied with: its importance weight, or 0 for a
  // masked row.
  double PolicyWeight(size_t row, double logprob) const;
  Term PolicyTerm(size_t row, double logprob) const;
  // Computes the numbers of whole sequences that the rows [first_row, first_row + n) depend on.
  absl::Status SetSequences(int64_t first_row, absl::Span<const double> logprobs);
  // These three take one sequence, whose rows begin at `begin`.
  void WeighSequence(size_t begin, absl::Span<const double> logprobs);
  void MaskSequence(size_t begin, absl::Span<const double> logprobs);
  void SetGspoTerms(size_t begin, absl::Span<const double> logprobs);

  PolicyLossOptions options_;
  const PolicyTokens* tokens_;
  // Only if needs_sequences(): [S + 1], and [N].
  std::vector<int64_t> sequence_begins_;
  std::vector<double> sequence_weights_;  // importance weights of sequences
  std::vector<uint8_t> off_policy_;       // whether the mean of log q - logp is above the threshold
  std::vector<Term> sequence_terms_;      // GSPO's
  PolicyMetrics sums_;                    // means hold sums until Metrics()
  MismatchSums senior_, junior_;
};

}  // namespace tandem::loss

#endif  // TANDEM_COMMON_LOSS_POLICY_LOSS_H_
