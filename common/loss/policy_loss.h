// The policy loss of every token, and what it contributes to the gradient and to the reports.
//
// Everything that the losses need from the [N, V] logits is the log-probability and the entropy of
// each row. So a loss is described by two numbers per token,
//   c_t = d loss / d logp_t   and   e_t = d loss / d entropy_t,
// and common/loss/fused_output_loss.h turns them into the gradient of the logits, chunk by chunk.
// Semantics: PPO (arXiv 1707.06347), asymmetric clip (DAPO, 2503.14476), dual clip (1912.09729),
// GSPO (2507.18071), CISPO (MiniMax-M1, 2506.13585), KL estimators k1-k3 (Schulman, "Approximating
// KL divergence"), truncated importance sampling (Yao et al. 2025) and its masked and
// sequence-level forms (richardli.xyz/rl-collapse).
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

// A log-ratio beyond this is clamped, and its gradient is zero.
inline constexpr double kMaxLogRatio = 20.0;

// Of a token with ratio r_t = exp(logp_t - logp_old_t) and advantage A_t; clip(r) is r cut to
// [1 - eps_low, 1 + eps_high].
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

// Whose importance weight is bounded: a token's, or the product over its sequence's rows.
enum class ImportanceSamplingLevel { kToken, kSequence };

// What becomes of one outside the bounds: it is set to the bound, or to 0.
enum class ImportanceSamplingMode { kTruncate, kMask };

// The estimate of a token, with the clamp of the log-ratio, without coefficient; k3 at most
// `k3_cap` (0: no cut). 0 for kNone.
double KlEstimate(KlEstimator estimator, double k3_cap, double logprob, double reference);

struct PolicyLossOptions {
  PolicyLossKind kind = PolicyLossKind::kPpoClip;
  double clip_ratio_low = 0.2;
  double clip_ratio_high = 0.2;
  // 0 is off, else > 1: the loss of a token with A < 0 is at most -A * this. Not of CISPO.
  double dual_clip = 0;
  KlEstimator kl_estimator = KlEstimator::kNone;
  double kl_coefficient = 0;  // beta
  // Most that k3 of a token may be, 0 is off; beyond it kK3 has no gradient. Of kK3 and
  // kK3GradientK2 only.
  double k3_cap = 0;
  // The KL of a token is multiplied by its ratio r_t, with the gradient of both (DeepSeek-V3.2,
  // arXiv 2512.02556). Not of GSPO.
  bool kl_importance_correction = false;
  double entropy_coefficient = 0;  // subtracted: loss -= this * entropy
  // The policy term is multiplied by the importance weight exp(logp_old - log q), a constant for
  // the gradient, bounded to [floor, cap]; log q = behaviour - log_keep_mass is what the writer
  // drew from after its cut. A cap of 0 is off.
  double importance_sampling_cap = 0;
  double importance_sampling_floor = 0;
  ImportanceSamplingLevel importance_sampling_level = ImportanceSamplingLevel::kToken;
  ImportanceSamplingMode importance_sampling_mode = ImportanceSamplingMode::kTruncate;

  bool operator==(const PolicyLossOptions&) const = default;
};

// Of coefficients and caps: far above any use, and no term overflows. A cap of that size is off.
inline constexpr double kMaxCoefficient = 1e9;

// INVALID_ARGUMENT with the field.
absl::Status CheckPolicyLossOptions(const PolicyLossOptions& options);

// The rows of the loss: all parallel, [N]. `reference` may be empty if the KL is off. `behaviour`
// is what the writer recorded (senior's or junior's own log-prob); empty if unknown. Empty
// `old_logprobs` are the log-probs being evaluated: the ratio is 1.
struct PolicyTokens {
  std::vector<double> old_logprobs;  // logp_old of the ratio
  std::vector<double> advantages;
  std::vector<double> scales;  // w_t / Z_t (loss_scale.h)
  std::vector<double> reference = {};
  std::vector<double> behaviour = {};
  std::vector<double> log_keep_mass = {};  // empty: nothing was cut
  std::vector<uint8_t> authorship = {};    // 1 senior, 0 junior
  // Rows of each sequence, in order, sum N; for what needs_sequences().
  std::vector<int64_t> sequence_rows = {};
  // Of the policy terms; empty: what options, old_logprobs and behaviour say.
  std::vector<double> importance_weights = {};
};

// log of the importance weight old / q of a row, which has an old log-probability.
double LogImportanceWeight(const PolicyTokens& tokens, size_t row);
// The weight within its bounds, or what is put in its place.
double BoundedImportanceWeight(const PolicyLossOptions& options, double log_weight);

// How far the trainer's log-probs are from those recorded by the writer.
// With d = trainer - behaviour: k1 = mean(-d), k3 = mean(exp(d) - d - 1), and the effective sample
// size (sum e^d)^2 / (n sum e^2d), a share of n (1 = no mismatch).
struct Mismatch {
  int64_t count = 0;
  double k1 = 0;
  double k3 = 0;
  double max_abs_logprob_diff = 0;
  double effective_sample_size = 1;
};

// Reports of the rows seen so far. Those marked "in the sum" are as they enter the loss, with scale
// and coefficient; the others are plain means over the rows (tokens with w > 0).
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
  double masked_fraction = 0;  // rows whose importance weight was set to 0
  Mismatch senior_mismatch;    // rows that the senior wrote
  Mismatch junior_mismatch;    // rows that the junior wrote; none when they weigh 0
};

// Sums over the rows of a batch, in the order in which they come.
class PolicyLossEvaluator {
 public:
  // `tokens` must outlive the evaluator. INVALID_ARGUMENT on lengths that differ or missing inputs.
  static absl::StatusOr<PolicyLossEvaluator> Create(const PolicyLossOptions& options,
                                                    const PolicyTokens& tokens);

  // Whether a row's coefficients depend on the log-probs of its whole sequence (GSPO, importance
  // weights of sequences): Evaluate then takes whole sequences alone.
  bool needs_sequences() const {
    return options_.kind == PolicyLossKind::kGspo || weighs_sequences();
  }

  // Coefficients of the rows [first_row, first_row + n): n is the size of every span. Adds the
  // rows' reports. NotFiniteError for a log-prob, an entropy or a coefficient; INTERNAL for a part
  // of a sequence where needs_sequences().
  absl::Status Evaluate(int64_t first_row, absl::Span<const double> logprobs,
                        absl::Span<const double> entropies, absl::Span<double> logprob_coefficients,
                        absl::Span<double> entropy_coefficients);

  PolicyMetrics Metrics() const;

  // Adds up what the evaluators of other rows of the same tokens have seen: Metrics() is then that
  // of one evaluator of all their rows. Of a copy, when more rows are to come. Errors are
  // `reduce`'s.
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
    double log_ratio = 0;  // of the ratio that is clipped
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
  double OldLogprob(size_t row, double logprob) const;
  double ImportanceWeight(size_t row, double logprob) const;
  Term PolicyTerm(size_t row, double logprob) const;
  // What the rows [first_row, first_row + n) depend on of their sequences.
  absl::Status SetSequences(int64_t first_row, absl::Span<const double> logprobs);
  // Of one sequence, whose rows begin at `begin`.
  void WeighSequence(size_t begin, absl::Span<const double> logprobs);
  void SetGspoTerms(size_t begin, absl::Span<const double> logprobs);

  PolicyLossOptions options_;
  const PolicyTokens* tokens_;
  // For what needs sequences: [S + 1], and [N].
  std::vector<int64_t> sequence_begins_;
  std::vector<double> sequence_weights_;  // importance weights of sequences
  std::vector<Term> sequence_terms_;      // GSPO's
  PolicyMetrics sums_;                    // means hold sums until Metrics()
  MismatchSums senior_, junior_;
};

}  // namespace tandem::loss

#endif  // TANDEM_COMMON_LOSS_POLICY_LOSS_H_
