#include "services/training_core/sequence_rows.h"

#include <algorithm>
#include <utility>

namespace tandem::training {
namespace {

bool SameImage(const PromptImages& a, const PromptImages& b, size_t i) {
  const VisionInput &x = a.inputs[i], &y = b.inputs[i];
  return x.digest == y.digest && x.shape.grid == y.shape.grid &&
         x.shape.is_video == y.shape.is_video &&
         x.shape.seconds_per_grid == y.shape.seconds_per_grid &&
         a.found.first_tokens[i] == b.found.first_tokens[i];
}

// Returns the first token of an image that the other prompt does not have, or `length`.
int64_t FirstOtherImage(const PromptImages* a, const PromptImages* b, int64_t length) {
  const size_t counts[] = {a == nullptr ? 0 : a->inputs.size(),
                           b == nullptr ? 0 : b->inputs.size()};
  const size_t both = std::min(counts[0], counts[1]);
  size_t i = 0;
  while (i < both && SameImage(*a, *b, i)) ++i;
  if (i < counts[0]) length = std::min(length, a->found.first_tokens[i]);
  if (i < counts[1]) length = std::min(length, b->found.first_tokens[i]);
  return length;
}

// Returns how many leading tokens took the same experts, of `length` ones with equal ids.
int64_t SameExperts(const SequenceRows& a, const SequenceRows& b, int64_t length) {
  if (a.routed_experts.empty() && b.routed_experts.empty()) return length;
  if (a.routed_experts.empty() || b.routed_experts.empty()) return 0;
  const size_t per_token = b.routed_experts.size() / b.input.size();
  const auto experts = b.routed_experts.first(static_cast<size_t>(length) * per_token);
  const auto differ = std::mismatch(experts.begin(), experts.end(), a.routed_experts.begin()).first;
  return static_cast<int64_t>(static_cast<size_t>(differ - experts.begin()) / per_token);
}

}  // namespace

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
  rows.unasked = static_cast<int64_t>(prompt.size()) - 1;
  rows.input.assign(prompt.begin(), prompt.end());
  const auto read = static_cast<size_t>(rows.positions.back()) + 1 - prompt.size();
  rows.input.insert(rows.input.end(), response.begin(), response.begin() + read);
  return rows;
}

int64_t CommonPrefix(const SequenceRows& previous, const SequenceRows& next) {
  const auto most = std::min({std::ssize(previous.input), std::ssize(next.input), next.unasked});
  const auto end = next.input.begin() + most;
  int64_t length =
      std::mismatch(next.input.begin(), end, previous.input.begin()).first - next.input.begin();
  length = FirstOtherImage(previous.images.get(), next.images.get(), length);
  return SameExperts(previous, next, length);
}

std::vector<int64_t> CommonPrefixes(absl::Span<const SequenceRows> sequences) {
  std::vector<int64_t> shared;
  const SequenceRows* previous = nullptr;
  for (const SequenceRows& sequence : sequences) {
    const bool reads = !sequence.input.empty();
    shared.push_back(reads && previous != nullptr ? CommonPrefix(*previous, sequence) : 0);
    if (reads) previous = &sequence;
  }
  return shared;
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
