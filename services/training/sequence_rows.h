// From sequences to what the model must read and which hidden states enter the loss. No tensors.
#ifndef TANDEM_SERVICES_TRAINING_SEQUENCE_ROWS_H_
#define TANDEM_SERVICES_TRAINING_SEQUENCE_ROWS_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/types/span.h"

namespace tandem::training {

// One sequence. Response token t is predicted by the hidden state at prompt + t - 1, so what comes
// after the last row is not read at all.
struct SequenceRows {
  std::vector<int64_t> input;      // tokens that the model reads; empty without rows
  std::vector<int64_t> positions;  // inside `input`
  std::vector<int64_t> labels;     // parallel to positions
};

// The rows of the tokens t of `response` that count.
SequenceRows SelectSequenceRows(absl::Span<const int32_t> prompt,
                                absl::Span<const int32_t> response,
                                absl::FunctionRef<bool(size_t t)> counts);

// Index of each sequence's first row among all rows, and one past the last.
std::vector<size_t> FirstRows(absl::Span<const SequenceRows> sequences);

}  // namespace tandem::training

#endif  // TANDEM_SERVICES_TRAINING_SEQUENCE_ROWS_H_
