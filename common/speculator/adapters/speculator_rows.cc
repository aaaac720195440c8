#include "common/speculator/adapters/speculator_rows.h"

#include <cstddef>

#include "absl/strings/str_cat.h"
#include "common/base/errors/error.h"

namespace tandem::speculator {

std::vector<SequenceTokens> PackedSequences(absl::Span<const int64_t> offsets) {
  std::vector<SequenceTokens> sequences;
  for (size_t s = 0; s + 1 < offsets.size(); ++s) {
    sequences.push_back({.begin = offsets[s], .length = offsets[s + 1] - offsets[s]});
  }
  return sequences;
}

std::vector<int64_t> SpeculatorRows::TargetCounts() const {
  std::vector<int64_t> counts;
  for (const loss::OutputRows& head : targets) {
    counts.push_back(static_cast<int64_t>(head.labels.size()));
  }
  return counts;
}

absl::StatusOr<SpeculatorRows> AlignRows(absl::Span<const SequenceTokens> sequences,
                                         absl::Span<const int64_t> labels, int64_t n_predict,
                                         int64_t num_token_ids) {
  for (size_t t = 0; t < labels.size(); ++t) {
    if (labels[t] != kIgnoredLabel && (labels[t] < 0 || labels[t] >= num_token_ids)) {
      return InvalidField(absl::StrCat("labels[", t, "]"),
                          absl::StrCat(labels[t], " is neither a token id nor ", kIgnoredLabel));
    }
  }
  const auto num_tokens = static_cast<int64_t>(labels.size());
  SpeculatorRows rows;
  rows.offsets = {0};
  rows.targets.resize(static_cast<size_t>(n_predict));
  for (size_t s = 0; s < sequences.size(); ++s) {
    const auto [begin, length] = sequences[s];
    if (begin < 0 || length < 0 || length > num_tokens - begin) {
      return InvalidField(
          absl::StrCat("sequences[", s, "]"),
          absl::StrCat(length, " tokens from ", begin, " on are outside a batch of ", num_tokens));
    }
    for (int64_t t = 0; t < length - (n_predict + 1); ++t) {
      const int64_t row = rows.size();
      rows.positions.push_back(begin + t);
      for (int64_t head = 0; head < n_predict; ++head) {
        const int64_t label = labels[static_cast<size_t>(begin + t + head + 2)];
        if (label == kIgnoredLabel) continue;
        loss::OutputRows& targets = rows.targets[static_cast<size_t>(head)];
        targets.positions.push_back(row);
        targets.labels.push_back(label);
      }
    }
    rows.offsets.push_back(rows.size());
  }
  return rows;
}

}  // namespace tandem::speculator
