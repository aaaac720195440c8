// The sequences of a batch: what the model reads of each, and which hidden states enter the loss.
// A *row* is one such hidden state with the token that it predicts. No tensors.
#ifndef TANDEM_SERVICES_TRAINING_CORE_SEQUENCE_ROWS_H_
#define TANDEM_SERVICES_TRAINING_CORE_SEQUENCE_ROWS_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/types/span.h"
#include "common/model/vision/prompt_images.h"
#include "common/steps/sequence_range.h"

namespace tandem::training {

// One sequence. The hidden state at prompt + t - 1 predicts response token t, so the model does not
// read what follows the last row.
struct SequenceRows {
  std::vector<int64_t> input;      // tokens that the model reads; empty without rows
  std::vector<int64_t> positions;  // of the rows, inside `input`
  std::vector<int64_t> labels;     // the predicted tokens, parallel to positions
  // [input.size(), layers with experts, experts per token]: the experts that the tokens take;
  // empty: the routers choose. The numbers belong to the caller.
  absl::Span<const uint16_t> routed_experts = {};
  std::shared_ptr<const PromptImages> images = nullptr;  // of the prompt; nullptr: text alone
  // Leading tokens whose hidden states are not asked for: those of the prompt but the last.
  int64_t unasked = 0;
};

// Returns the rows of the response tokens t for which `counts(t)` holds.
SequenceRows SelectSequenceRows(absl::Span<const int32_t> prompt,
                                absl::Span<const int32_t> response,
                                absl::FunctionRef<bool(size_t t)> counts);

// Returns how many leading tokens of `next` may stand for those of `previous`, too: they have equal
// ids, images and experts, and the hidden state of none is asked for in `next`.
int64_t CommonPrefix(const SequenceRows& previous, const SequenceRows& next);

// Returns for every sequence its CommonPrefix with the last one before it that has an input; 0
// without one.
std::vector<int64_t> CommonPrefixes(absl::Span<const SequenceRows> sequences);

// Consecutive rows of a batch, [begin, end).
struct RowRange {
  size_t begin = 0;
  size_t end = 0;

  size_t size() const { return end - begin; }
  // Returns the numbers of these rows from a vector that has one for each row of the batch.
  template <typename T>
  absl::Span<const T> Of(const std::vector<T>& numbers) const {
    return absl::MakeConstSpan(numbers).subspan(begin, size());
  }

  bool operator==(const RowRange&) const = default;
};

// All sequences of a batch. Rows are numbered through the batch, sequence after sequence: a vector
// with one number for each row belongs to the batch, and Rows says where those of a sequence are.
class SequenceBatch {
 public:
  SequenceBatch() = default;
  explicit SequenceBatch(std::vector<SequenceRows> sequences);

  void Add(SequenceRows sequence);
  // Sets the images of every sequence, in their order.
  void SetImages(const std::vector<std::shared_ptr<const PromptImages>>& images);

  absl::Span<const SequenceRows> sequences() const { return sequences_; }
  SequenceRange all() const { return {.begin = 0, .end = sequences_.size()}; }
  RowRange Rows(const SequenceRange& range) const {
    return {.begin = first_rows_[range.begin], .end = first_rows_[range.end]};
  }

 private:
  std::vector<SequenceRows> sequences_;
  std::vector<size_t> first_rows_ = {0};  // of each sequence, and one past the last row
};

}  // namespace tandem::training

#endif  // TANDEM_SERVICES_TRAINING_CORE_SEQUENCE_ROWS_H_
