// Draws one token from one row of logits.
#ifndef TANDEM_COMMON_TANDEM_TANDEM_SAMPLER_H_
#define TANDEM_COMMON_TANDEM_TANDEM_SAMPLER_H_

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "common/kernels/logit_blocks.h"
#include "common/tandem/tandem_config.h"

namespace tandem {

struct SampledToken {
  int32_t token = 0;
  // log-softmax(logits / temperature)[token], before any cut.
  float logprob = 0.0f;
  // Log of the probability mass that the cut kept; exactly 0 when it kept everything.
  float log_keep_mass = 0.0f;
};

// Draws tokens, with scratch space for one vocabulary; one object per thread. Results depend on the
// row, the parameters and `u` alone. A log-probability has the bits of the fused output loss, which
// sums a row in the same order (common/kernels/logit_blocks.h).
class TandemSampler {
 public:
  // Applies temperature, then top-k, then top-p over what is left (the token that reaches top_p
  // stays), then min-p against the largest; then inverts the cumulative distribution, in id order,
  // at `u` in [0, 1). Tokens with equal logits at the border of a cut: the lower ids stay.
  // Temperature 0 takes the largest logit (the lowest id among equals), with the log-prob of
  // temperature 1 and log_keep_mass 0; u and the cuts are not read.
  // INTERNAL when a logit is NaN or +inf or when none is finite. -inf is a token that cannot be.
  // `params` must have passed Validate.
  absl::StatusOr<SampledToken> Sample(std::span<const float> logits, const SamplingParams& params,
                                      double u);

  // Returns log-softmax(logits / temperature)[token] as Sample does (temperature 0 counts as 1).
  absl::StatusOr<float> TokenLogProb(std::span<const float> logits, double temperature,
                                     int32_t token);

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
  int32_t DrawCut(std::span<const float> logits, const SamplingParams& params, double u,
                  float& log_keep_mass);

  // Fills scaled_ (logits / temperature - their maximum), weights_ (its exp) and block_sums_.
  // Returns the sum of the weights. The next two need it.
  double FillRow(std::span<const float> logits);
  // Returns the border of the shortest prefix of the tokens within `within` that has `count` tokens
  // or, if count is 0, at least `mass`; `within` itself if it is not longer.
  Border FindBorder(Border within, int64_t count, double mass);
  // Sets the weights after `border` to zero, and returns the sum of the others.
  double Cut(Border border);

  // Returns the first token whose cumulative weight exceeds `target`, or the last token with weight
  // if rounding keeps the sum below it. `weigh(begin, end)` provides weights_ of those tokens.
  template <typename Weigh>
  int32_t Invert(double target, const Weigh& weigh);

  float scale_ = 1.0f;
  kernels::LogitRow row_;  // of logits * scale_
  std::vector<float> block_max_, block_sum_, block_weighted_;
  std::vector<double> block_sums_;  // weights of the blocks, relative to the maximum of the row
  std::vector<float> scaled_;
  std::vector<float> weights_;
  std::vector<double> histogram_;
  std::vector<Border> candidates_;
};

}  // namespace tandem

#endif  // TANDEM_COMMON_TANDEM_TANDEM_SAMPLER_H_
