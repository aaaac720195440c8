// Advantages: how much better than expected a response, or one of its tokens, was. They are
// computed on the host in double precision, which costs little beside the model's work.
#ifndef TANDEM_COMMON_LOSS_ADVANTAGES_H_
#define TANDEM_COMMON_LOSS_ADVANTAGES_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace tandem::loss {

// The standard deviation (ddof 1) that the distance of a reward from its group's mean is divided
// by.
enum class RewardStd {
  kNone,   // no division (Dr.GRPO, arXiv 2503.20783)
  kGroup,  // of the group's rewards (GRPO, arXiv 2402.03300)
  kBatch,  // of all rewards (arXiv 2508.08221)
};

// Added to the standard deviation (verl; Hugging Face TRL adds 1e-4).
inline constexpr double kDefaultStdEpsilon = 1e-6;

// Rewards of a group are equal where they differ by no more than this, times the largest of their
// magnitudes where that is above 1: sums of the same scores in another order differ by rounding.
// The client's dynamic sampling has the same rule (clients/python/tandem/training/groups.py).
inline constexpr double kRewardTolerance = 1e-9;

// Group-relative advantages: (r - mean of the group) / (std + epsilon). A group of one gets 0, and
// so does one whose rewards are equal (kRewardTolerance).
// `rewards` and `group_ids` [S] are parallel; groups need not be contiguous, and the result does
// not depend on their order. INVALID_ARGUMENT for different lengths ("group_ids") or a reward that
// is not finite ("rewards[i]").
absl::StatusOr<std::vector<double>> GroupRelativeAdvantages(absl::Span<const double> rewards,
                                                            absl::Span<const int64_t> group_ids,
                                                            RewardStd std = RewardStd::kGroup,
                                                            double epsilon = kDefaultStdEpsilon);

// Leave-one-out (RLOO, arXiv 2402.14740): r minus the mean of the group's other rewards. A group of
// one gets 0, and so does one whose rewards are equal. Arguments and errors are those of
// GroupRelativeAdvantages.
absl::StatusOr<std::vector<double>> LeaveOneOutAdvantages(absl::Span<const double> rewards,
                                                          absl::Span<const int64_t> group_ids);

struct GaeOptions {
  double gamma = 1.0;
  double lambda = 1.0;
  // Whether to bootstrap after a response that was cut by its length limit: with the value of the
  // state behind the last token, instead of 0.
  bool bootstrap_truncated = false;
};

struct GaeResult {
  std::vector<double> advantages;  // [L]
  std::vector<double> returns;     // [L], advantages + values
};

// Generalised advantage estimation (arXiv 1506.02438) over one response of L tokens. It runs
// *through* junior tokens: they belong to the trajectory, and only the policy loss weighs them.
// `rewards` [L] has a number per token (an outcome reward is on the last one). values[t] of
// `values` [L + 1] is the value of the state before token t; values[L], of the state behind the
// last token, is read only if `truncated` and options.bootstrap_truncated. INVALID_ARGUMENT for
// wrong lengths or numbers that are not finite.
absl::StatusOr<GaeResult> GeneralizedAdvantages(absl::Span<const double> rewards,
                                                absl::Span<const double> values, bool truncated,
                                                const GaeOptions& options);

// Shifts and scales `advantages` (all response tokens of the global batch, both authors) to mean 0
// and standard deviation 1 (ddof 1, with 1e-8 under the root as in verl). A single advantage
// becomes 0.
void WhitenAdvantages(absl::Span<double> advantages);

}  // namespace tandem::loss

#endif  // TANDEM_COMMON_LOSS_ADVANTAGES_H_
