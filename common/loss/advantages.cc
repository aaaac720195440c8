#include "common/loss/advantages.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <map>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "common/base/errors/error.h"
#include "common/base/errors/field_check.h"
#include "common/base/errors/status_macros.h"

namespace tandem::loss {
namespace {

absl::Status CheckAllFinite(absl::string_view name, absl::Span<const double> numbers) {
  for (size_t i = 0; i < numbers.size(); ++i) {
    if (!std::isfinite(numbers[i])) return CheckFinite(absl::StrCat(name, "[", i, "]"), numbers[i]);
  }
  return absl::OkStatus();
}

using Groups = std::map<int64_t, std::vector<size_t>>;

absl::StatusOr<Groups> MakeGroups(absl::Span<const double> rewards,
                                  absl::Span<const int64_t> group_ids) {
  if (rewards.size() != group_ids.size()) {
    return InvalidField("group_ids", absl::StrCat("has ", group_ids.size(), " entries for ",
                                                  rewards.size(), " rewards"));
  }
  TANDEM_RETURN_IF_ERROR(CheckAllFinite("rewards", rewards));
  Groups groups;
  for (size_t i = 0; i < rewards.size(); ++i) groups[group_ids[i]].push_back(i);
  return groups;
}

// Whether the rewards of a group compare its members with each other.
bool Varies(absl::Span<const double> rewards, const std::vector<size_t>& members) {
  double least = rewards[members[0]], most = least;
  for (const size_t i : members) {
    least = std::min(least, rewards[i]);
    most = std::max(most, rewards[i]);
  }
  return most - least > kRewardTolerance * std::max({1.0, std::abs(least), std::abs(most)});
}

struct Moments {
  double mean = 0, std = 0;
};

// The standard deviation has ddof 1. Both are 0 for fewer than two members.
Moments MomentsOf(absl::Span<const double> rewards, const std::vector<size_t>& members) {
  Moments moments;
  if (members.size() < 2) return moments;
  for (const size_t i : members) moments.mean += rewards[i];
  moments.mean /= static_cast<double>(members.size());
  double squares = 0;
  for (const size_t i : members) {
    squares += (rewards[i] - moments.mean) * (rewards[i] - moments.mean);
  }
  moments.std = std::sqrt(squares / static_cast<double>(members.size() - 1));
  return moments;
}

}  // namespace

absl::StatusOr<std::vector<double>> GroupRelativeAdvantages(absl::Span<const double> rewards,
                                                            absl::Span<const int64_t> group_ids,
                                                            RewardStd std, double epsilon) {
  TANDEM_ASSIGN_OR_RETURN(const Groups groups, MakeGroups(rewards, group_ids));
  double batch_std = 0;
  if (std == RewardStd::kBatch) {
    std::vector<size_t> all(rewards.size());
    std::iota(all.begin(), all.end(), size_t{0});
    batch_std = MomentsOf(rewards, all).std;
  }
  std::vector<double> advantages(rewards.size(), 0.0);
  for (const auto& [id, members] : groups) {
    if (!Varies(rewards, members)) continue;
    const Moments group = MomentsOf(rewards, members);
    const double divisor = std == RewardStd::kNone
                               ? 1.0
                               : (std == RewardStd::kGroup ? group.std : batch_std) + epsilon;
    for (const size_t i : members) advantages[i] = (rewards[i] - group.mean) / divisor;
  }
  return advantages;
}

absl::StatusOr<std::vector<double>> LeaveOneOutAdvantages(absl::Span<const double> rewards,
                                                          absl::Span<const int64_t> group_ids) {
  TANDEM_ASSIGN_OR_RETURN(const Groups groups, MakeGroups(rewards, group_ids));
  std::vector<double> advantages(rewards.size(), 0.0);
  for (const auto& [id, members] : groups) {
    if (!Varies(rewards, members)) continue;
    double sum = 0;
    for (size_t i : members) sum += rewards[i];
    const auto others = static_cast<double>(members.size() - 1);
    for (size_t i : members) advantages[i] = rewards[i] - (sum - rewards[i]) / others;
  }
  return advantages;
}

absl::StatusOr<GaeResult> GeneralizedAdvantages(absl::Span<const double> rewards,
                                                absl::Span<const double> values, bool truncated,
                                                const GaeOptions& options) {
  if (values.size() != rewards.size() + 1) {
    return InvalidField(
        "values", absl::StrCat("has ", values.size(), " entries, expected ", rewards.size() + 1));
  }
  TANDEM_RETURN_IF_ERROR(CheckAllFinite("rewards", rewards));
  TANDEM_RETURN_IF_ERROR(CheckAllFinite("values", values));
  const size_t length = rewards.size();
  GaeResult result;
  result.advantages.resize(length);
  result.returns.resize(length);
  double next_value = truncated && options.bootstrap_truncated ? values[length] : 0.0;
  double advantage = 0;
  for (size_t t = length; t-- > 0;) {
    const double delta = rewards[t] + options.gamma * next_value - values[t];
    advantage = delta + options.gamma * options.lambda * advantage;
    result.advantages[t] = advantage;
    result.returns[t] = advantage + values[t];
    next_value = values[t];
  }
  return result;
}

void WhitenAdvantages(absl::Span<double> advantages) {
  if (advantages.empty()) return;
  const auto count = static_cast<double>(advantages.size());
  double mean = 0;
  for (double a : advantages) mean += a;
  mean /= count;
  double squares = 0;
  for (double a : advantages) squares += (a - mean) * (a - mean);
  const double scale = advantages.size() < 2 ? 1.0 : 1.0 / std::sqrt(squares / (count - 1) + 1e-8);
  for (double& a : advantages) a = (a - mean) * scale;
}

}  // namespace tandem::loss
