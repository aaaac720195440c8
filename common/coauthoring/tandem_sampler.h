// Draws one token from one row of logits.
#ifndef TANDEM_COMMON_COAUTHORING_TANDEM_SAMPLER_H_
#define TANDEM_COMMON_COAUTHORING_TANDEM_SAMPLER_H_

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "common/coauthoring/tandem_config.h"
#include "common/kernels/logit_blocks.h"

namespace tandem {

// A token and its log-probability.
struct LikelyToken {
  int32_t token = 0;
  float logprob = 0.0f;

  bool operator==(const LikelyToken&) const = default;
};

struct SampledToken {
  int32_t token = 0;
  // log-softmax(logits / temperature)[token], before any cut.
  float logprob = 0.0f;
  // Log of the probability mass that the cut kept; exactly 0 when it kept everything.
  float log_keep_mass = 0.0f;
  // The likeliest tokens of the row, if they were asked for; see TandemSampler::Top.
  std::vector<LikelyToken> top = {};
};

// A draft of the token that is to be drawn, for rejection sampling (Leviathan et al. 2023, Chen et
// al. 2023).
struct DraftProposal {
  static constexpr int32_t kNone = -1;
  int32_t token = kNone;
  // The distribution q that the draft was drawn from: [vocabulary]; empty for a draft that was not
  // drawn: its q is 1 at the draft.
  std::span<const float> distribution;
  double accept_u = 0;    // decides, in [0, 1), whether the draft is accepted
  double residual_u = 0;  // chooses, in [0, 1), the token that replaces a rejected draft
};

// Draws tokens, with scratch space for one vocabulary; one object per thread. Results depend on the
// arguments alone. A log-probability has the bits of the fused output loss, which sums a row in the
// same order (common/kernels/logit_blocks.h).
class TandemSampler {
 public:
  // Applies temperature, then top-k, then top-p over what is left (the token that reaches top_p
  // stays), then min-p against the largest; then inverts the cumulative distribution, in id order,
  // at `u` in [0, 1). Tokens with equal logits at the border of a cut: the lower ids stay.
  // Temperature 0 takes the largest logit (the lowest id among equals), with the log-prob of
  // temperature 1 and log_keep_mass 0; u and the cuts are not read.
  // INTERNAL when a logit is NaN or +inf or when none is finite. -inf is a token that cannot be.
  // `params` must have passed Validate.
  //
  // With a draft, u is not read. Let p be the distribution that the cuts leave, and q that of the
  // draft x: returns x with probability min(1, p(x) / q(x)), and otherwise a token with probability
  // max(0, p - q) / Z, which is never x. So the token is distributed by p, whatever q is, if x was
  // drawn from q and the numbers are independent of each other and of x. At temperature 0 the
  // draft is not read. INVALID_ARGUMENT for a draft that does not fit the row.
  //
  // Writes p, [vocabulary], to `distribution` unless that is null or the temperature is 0.
  absl::StatusOr<SampledToken> Sample(std::span<const float> logits, const SamplingParams& params,
                                      double u, const DraftProposal& draft = {},
                                      std::vector<float>* distribution = nullptr);

  // Returns log-softmax(logits / temperature)[token] as Sample does (temperature 0 counts as 1).
  absl::StatusOr<float> TokenLogProb(std::span<const float> logits, double temperature,
                                     int32_t token);

  // Returns the `count` likeliest tokens of a row whose logits the last call took, with their
  // log-probs as Sample returns them: the likeliest first, of equal ones the lower id.
  std::vector<LikelyToken> Top(std::span<const float> logits, size_t count);

  // Lets log-probabilities follow from these statistics of a row's logits by the temperature, which
  // a device summed up in its own order, until the next call of SetStatistics; std::nullopt: from
  // those made here. What is drawn does not change.
  void SetStatistics(const std::optional<kernels::LogitRow>& row) { given_row_ = row; }

  // The error of a row that is no distribution, here and where tokens are drawn on a device.
  static absl::Status BrokenLogits();

 private:
  // The last token that a cut keeps, in the order (scaled logit descending, id ascending).
  struct Border {
    float scaled;
    int32_t id;
  };

  // Computes row_ and the statistics of its blocks, which all other members read.
  absl::Status Prepare(std::span<const float> logits, double temperature);
  float Scaled(float logit) const { return logit * scale_; }
  float LogProb(float logit) const;
  int32_t Largest(std::span<const float> logits) const;
  int32_t DrawUncut(std::span<const float> logits, double u);

  // Fills scaled_ (logits / temperature - their maximum), weights_ (its exp) and block_sums_.
  // Returns the sum of the weights. The next three need it.
  double FillRow(std::span<const float> logits);
  // Computes block_sums_ from weights_; returns their sum.
  double SumWeights();
  // Returns the border of the shortest prefix of the tokens within `within` that has `count` tokens
  // or, if count is 0, at least `mass`; `within` itself if it is not longer.
  Border FindBorder(Border within, int64_t count, double mass);
  // Sets the weights after `border` to zero, and returns the sum of the others.
  double Cut(Border border);
  // Does what FillRow does, with the weights that the cuts leave, and computes the keep mass.
  double FillCutRow(std::span<const float> logits, const SamplingParams& params,
                    float& log_keep_mass);
  // Returns the draft, or a token of the residual, from weights_, whose sum is `kept`. Overwrites
  // weights_.
  int32_t AcceptOrReplace(const DraftProposal& draft, double kept);

  // Returns the first token whose cumulative weight exceeds `target`, or the last token with weight
  // if rounding keeps the sum below it. `weigh(begin, end)` provides weights_ of those tokens.
  template <typename Weigh>
  int32_t Invert(double target, const Weigh& weigh);
  // Invert where weights_ has the whole row.
  int32_t InvertRow(double target);

  float scale_ = 1.0f;
  kernels::LogitRow row_;  // of logits * scale_
  std::optional<kernels::LogitRow> given_row_;
  std::vector<float> block_max_, block_sum_, block_weighted_;
  std::vector<double> block_sums_;  // weights of the blocks, relative to the maximum of the row
  std::vector<float> scaled_;
  std::vector<float> weights_;
  std::vector<double> histogram_;
  std::vector<Border> candidates_;
  std::vector<int32_t> ids_;
};

}  // namespace tandem

#endif  // TANDEM_COMMON_COAUTHORING_TANDEM_SAMPLER_H_
