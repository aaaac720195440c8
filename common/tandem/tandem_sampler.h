// Draws one token from one row of logits.
#ifndef TANDEM_COMMON_TANDEM_TANDEM_SAMPLER_H_
#define TANDEM_COMMON_TANDEM_TANDEM_SAMPLER_H_

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "common/tandem/tandem_config.h"

namespace tandem {

struct SampledToken {
  int32_t token = 0;
  // log-softmax(logits / temperature)[token], before any cut.
  float logprob = 0.0f;
  // Log of the probability mass that the cut kept; exactly 0 when it kept everything.
  float log_keep_mass = 0.0f;
};

// A draft of the token that is to be drawn, for rejection sampling (Leviathan et al. 2023, Chen et
// al. 2023).
struct DraftProposal {
  static constexpr int32_t kNone = -1;
  int32_t token = kNone;
  // The distribution q that the draft was drawn from: [vocabulary]; empty for a draft that was not
  // drawn, whose q is 1 at the draft.
  std::span<const float> distribution;
  double accept_u = 0;    // decides, in [0, 1), whether the draft is accepted
  double residual_u = 0;  // chooses, in [0, 1), the token that replaces a rejected draft
};

// Draws tokens, with scratch space for one vocabulary; one object per thread. Results depend on the
// row, the parameters and `u` alone, and are the same on every x86 machine: the order of every sum
// is fixed.
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
  // With a proposal, p being the distribution that the cuts leave: returns the draft with
  // probability min(1, p / q), and otherwise a token with probability max(0, p - q) / Z, which is
  // never the draft. So the token is distributed by p whatever q is, if the draft was drawn from q
  // and the three numbers are independent; u is not read. At temperature 0 the proposal is not.
  // INVALID_ARGUMENT for a proposal that does not fit the row.
  //
  // Where `distribution` is not null, it gets p: [vocabulary]. Not for temperature 0.
  absl::StatusOr<SampledToken> Sample(std::span<const float> logits, const SamplingParams& params,
                                      double u, const DraftProposal& proposal = {},
                                      std::vector<float>* distribution = nullptr);

  // Returns log-softmax(logits / temperature)[token] as Sample does (temperature 0 counts as 1).
  absl::StatusOr<float> TokenLogProb(std::span<const float> logits, double temperature,
                                     int32_t token);

 private:
  // The last token that a cut keeps, in the order (scaled logit descending, id ascending).
  struct Border {
    float scaled;
    int32_t id;
  };

  // Fills scaled_ (logits / temperature - their maximum) and weights_ (its exp); sets argmax_ and
  // total_ (the sum of weights).
  absl::Status Prepare(std::span<const float> logits, double temperature);
  // Returns the border of the shortest prefix of the tokens within `within` that has `count` tokens
  // or, if count is 0, at least `mass`; `within` itself if it is not longer.
  Border FindBorder(Border within, int64_t count, double mass);
  // Sets the weights after `border` to zero, and returns the sum of the others.
  double Cut(Border border);
  int32_t Invert(double target) const;
  // Sums block_sums_[b] again; returns the sum.
  double SumBlock(size_t b);
  // Returns the draft, or a token of the residual, of weights that sum up to `kept`. Overwrites
  // weights_.
  int32_t AcceptOrReplace(const DraftProposal& proposal, double kept);

  std::vector<float> scaled_;
  std::vector<float> weights_;
  std::vector<double> block_sums_;
  std::vector<double> histogram_;
  std::vector<Border> candidates_;
  int32_t argmax_ = 0;
  double total_ = 0.0;
};

}  // namespace tandem

#endif  // TANDEM_COMMON_TANDEM_TANDEM_SAMPLER_H_
