#include "common/steps/micro_batches.h"

#include <algorithm>

namespace tandem::training {
namespace {

std::vector<MicroBatch> Pack(absl::Span<const int64_t> lengths, absl::Span<const int64_t> shared,
                             int64_t token_budget) {
  std::vector<MicroBatch> plan;
  MicroBatch current;
  int64_t tokens = 0;
  const auto close = [&](size_t end) {
    current.end = end;
    if (tokens > 0) plan.push_back(current);
    current.begin = end;
    tokens = 0;
  };
  for (size_t s = 0; s < lengths.size(); ++s) {
    const int64_t own = shared.empty() ? lengths[s] : lengths[s] - shared[s];
    if (tokens > 0 && tokens + own > token_budget) close(s);
    tokens += tokens > 0 ? own : lengths[s];
  }
  close(lengths.size());
  return plan;
}

}  // namespace

std::vector<MicroBatch> PlanMicroBatches(absl::Span<const int64_t> lengths, int64_t token_budget,
                                         int64_t ranks, absl::Span<const int64_t> shared) {
  std::vector<MicroBatch> plan = Pack(lengths, shared, token_budget);
  if (ranks == 1 || plan.empty()) return plan;
  const auto count = static_cast<int64_t>(plan.size());
  const int64_t limit = (count + ranks - 1) / ranks * ranks;
  int64_t enough = token_budget, too_little = 0;
  while (enough - too_little > 1) {
    const int64_t middle = too_little + (enough - too_little) / 2;
    (static_cast<int64_t>(Pack(lengths, shared, middle).size()) <= limit ? enough : too_little) =
        middle;
  }
  return Pack(lengths, shared, enough);
}

}  // namespace tandem::training
