// Advantages: how much better than expected a response, or one of its tokens, was. Pure arithmetic
// on the host in double precision; the numbers of tokens are small beside the model's work.
#ifndef TANDEM_COMMON_LOSS_ADVANTAGES_H_
#define TANDEM_COMMON_LOSS_ADVANTAGES_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace tandem::loss {

// What the distance of a reward from its group's mean is divided by; with ddof 1.
enum class RewardStd {
  kNone,   // nothing (Dr.GRPO, arXiv 2503.20783)
  kGroup,  // the standard deviation of the group's rewards (GRPO, arXiv 2402.03300)
  kBatch,  // that of all rewards (arXiv 2508.08221)
};

// Added to the standard deviation (verl; Hugging Face TRL adds 1e-4).
inline constexpr double kDefaultStdEpsilon = 1e-6;

// Group-relative advantages: (r - mean of the group) / (std + epsilon). A group of one gets 0.
// `rewards` and `group_ids` are parallel, [S]; groups need not be contiguous and the result does
// not depend on the order of the groups. INVALID_ARGUMENT on different lengths or a reward that is
// not finite ("rewards[i]").
absl::StatusOr<std::vector<double>> GroupRelativeAdvantages(absl::Span<const double> rewards,
                                                            absl::Span<const int64_t> group_ids,
                                                            RewardStd std = RewardStd::kGroup,
                                                            double epsilon = kDefaultStdEpsilon);

// Leave-one-out (RLOO, arXiv 2402.14740): r minus the mean of the group's other rewards. A group of
// one gets 0. Arguments and errors as above.
absl::StatusOr<std::vector<double>> LeaveOneOutAdvantages(absl::Span<const double> rewards,
                                                          absl::Span<const int64_t> group_ids);

struct GaeOptions {
  double gamma = 1.0;
  double lambda = 1.0;
  // After a response that was cut by its length limit: bootstrap with the value of the state behind
  // the last token, instead of 0.
  bool bootstrap_truncated = false;
};

struct GaeResult {
  std::vector<double> advantages;  // [L]
  std::vector<double> returns;     // [L], advantages + values
};

// Generalised advantage estimation (arXiv 1506.02438) over one response of L tokens. It runs
// *through* junior tokens: they are part of the trajectory, only the policy loss weighs them.
// `rewards` [L] per token (an outcome reward sits on the last one); `values` [L + 1]: values[t] is
// the value of the state before token t, values[L] that of the state behind the last token, read
// only if `truncated` and options.bootstrap_truncated. INVALID_ARGUMENT on wrong lengths or numbers
// that are not finite.
absl::StatusOr<GaeResult> GeneralizedAdvantages(absl::Span<const double> rewards,
                                                absl::Span<const double> values, bool truncated,
                                                const GaeOptions& options);

// Shifts and scales `advantages` (all response tokens of the global batch, both authors) to mean 0
// and standard deviation 1, ddof 1, with 1e-8 under the root as in verl. Fewer than two: only the
// mean is removed.
void WhitenAdvantages(absl::Span<double> advantages);

}  // namespace tandem::loss

#endif  // TANDEM_COMMON_LOSS_ADVANTAGES_H_
