#include "services/training_core/sequence_rows.h"

#include <utility>

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

SequenceBatch::SequenceBatch(std::vector<SequenceRows> sequences) {
  for (SequenceRows& sequence : sequences) Add(std::move(sequence));
}

void SequenceBatch::Add(SequenceRows sequence) {
  first_rows_.push_back(first_rows_.back() + sequence.positions.size());
  sequences_.push_back(std::move(sequence));
}

void SequenceBatch::SetImages(const std::vector<std::shared_ptr<const PromptImages>>& images) {
  for (size_t i = 0; i < sequences_.size(); ++i) sequences_[i].images = images[i];
}

}  // namespace tandem::training
