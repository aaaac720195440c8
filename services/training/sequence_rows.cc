#include "services/training/sequence_rows.h"

namespace tandem::training {

SequenceRows SelectSequenceRows(absl::Span<const int32_t> prompt,
                                absl::Span<const int32_t> response,
                                absl::FunctionRef<bool(size_t t)> counts) {
  SequenceRows rows;
  for (size_t t = 0; t < response.size(); ++t) {
    if (!counts(t)) continue;
    rows.positions.push_back(static_cast<int64_t>(prompt.size() + t) - 1);
    rows.labels.push_back(response[t]);
  }
  if (rows.positions.empty()) return rows;
  rows.input.assign(prompt.begin(), prompt.end());
  const auto read = static_cast<size_t>(rows.positions.back()) + 1 - prompt.size();
  rows.input.insert(rows.input.end(), response.begin(), response.begin() + read);
  return rows;
}

std::vector<size_t> FirstRows(absl::Span<const SequenceRows> sequences) {
  std::vector<size_t> first = {0};
  for (const SequenceRows& sequence : sequences) {
    first.push_back(first.back() + sequence.positions.size());
  }
  return first;
}

}  // namespace tandem::training
