#include "common/training/micro_batches.h"

namespace tandem::training {

std::vector<MicroBatch> PlanMicroBatches(absl::Span<const int64_t> lengths, int64_t token_budget) {
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
    if (tokens > 0 && tokens + lengths[s] > token_budget) close(s);
    tokens += lengths[s];
  }
  close(lengths.size());
  return plan;
}

}  // namespace tandem::training
