// The rows of a batch that a speculator learns from. Row t of a sequence of L tokens has the hidden
// state of token t, and the pass that starts there consumes the tokens t + 1, t + 2, … The target
// of head i is the label t + i + 2. So that every head has a target, the rows are
// t < L - (n_predict + 1), of each sequence by its own length: a sequence never sees another one,
// nor its padding.
#ifndef TANDEM_COMMON_SPECULATOR_ADAPTERS_SPECULATOR_ROWS_H_
#define TANDEM_COMMON_SPECULATOR_ADAPTERS_SPECULATOR_ROWS_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/loss/logits/fused_output_loss.h"

namespace tandem::speculator {

// The label of a token that is no target.
inline constexpr int64_t kIgnoredLabel = -100;

// The tokens [begin, begin + length) of a batch. Sequences of a packed batch follow each other;
// between those of a padded one lies the padding.
struct SequenceTokens {
  int64_t begin = 0;
  int64_t length = 0;
};

// Returns the sequences of a packed batch, as RaggedBatch::offsets has them.
std::vector<SequenceTokens> PackedSequences(absl::Span<const int64_t> offsets);

struct SpeculatorRows {
  std::vector<int64_t> positions;         // [N], tokens of the batch
  std::vector<int64_t> offsets;           // SpeculatorInput::offsets
  std::vector<loss::OutputRows> targets;  // of each head: some of the N rows, with labels

  int64_t size() const { return static_cast<int64_t>(positions.size()); }
  // Returns the number of targets of each head.
  std::vector<int64_t> TargetCounts() const;
};

// Aligns the sequences of a batch with its labels, one per token: a token id, or kIgnoredLabel.
// INVALID_ARGUMENT for "labels" outside [0, num_token_ids), or "sequences" outside the batch.
absl::StatusOr<SpeculatorRows> AlignRows(absl::Span<const SequenceTokens> sequences,
                                         absl::Span<const int64_t> labels, int64_t n_predict,
                                         int64_t num_token_ids);

}  // namespace tandem::speculator

#endif  // TANDEM_COMMON_SPECULATOR_ADAPTERS_SPECULATOR_ROWS_H_
