// The rows of sequences that begin with rows of other ones: a prefix that they have in common
// stands once in a ragged batch. No torch.
#ifndef TANDEM_COMMON_OPS_ATTENTION_SHARED_PREFIXES_H_
#define TANDEM_COMMON_OPS_ATTENTION_SHARED_PREFIXES_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/types/span.h"

namespace tandem::ops {

// Consecutive rows of a batch.
struct RowRun {
  int64_t row = 0, rows = 0;

  bool operator==(const RowRun&) const = default;
};

// Sequence s has rows of its own, [offsets[s], offsets[s + 1]), for the positions from starts[s]
// on. The rows of its first starts[s] positions are those of sequence s - 1, which may itself have
// them of an earlier one. So sequences in the order of a depth-first walk share a tree of prefixes.
class SharedPrefixes {
 public:
  // starts[0] is 0, and starts[s] at most the length of sequence s - 1.
  SharedPrefixes(const std::vector<int64_t>& offsets, const std::vector<int64_t>& starts);

  size_t size() const { return sequences_.size(); }
  int64_t start(size_t s) const { return sequences_[s].start; }
  // Number of tokens of a sequence, shared ones included.
  int64_t length(size_t s) const { return sequences_[s].length; }
  // The rows of all positions of a sequence, in ascending order of positions.
  absl::Span<const RowRun> runs(size_t s) const { return sequences_[s].runs; }
  int64_t RowOf(size_t s, int64_t position) const;

  // The rows of a sequence in blocks of kAttentionBlock positions, as AttentionArgs::blocks has
  // them: the first row of each block. A block whose rows do not lie side by side is copied behind
  // the rows of the batch.
  const int32_t* blocks(size_t s) const { return sequences_[s].blocks.data(); }
  struct Copy {
    RowRun from;
    int64_t to = 0;
  };
  absl::Span<const Copy> copies() const { return copies_; }
  // Number of rows, copies included.
  int64_t num_rows() const { return num_rows_; }

 private:
  struct Sequence {
    int64_t start = 0, length = 0;
    std::vector<RowRun> runs;
    std::vector<int32_t> blocks;
  };

  void AddBlocks(Sequence& sequence);

  std::vector<Sequence> sequences_;
  std::vector<Copy> copies_;
  int64_t num_rows_ = 0;
};

// The rows of sequence s of a batch, of which sequences share prefixes or, with nullptr, none does.
class SequenceRuns {
 public:
  SequenceRuns(const std::vector<int64_t>& offsets, const SharedPrefixes* prefixes, size_t s)
      : own_({.row = offsets[s], .rows = offsets[s + 1] - offsets[s]}),
        start_(prefixes == nullptr ? 0 : prefixes->start(s)),
        shared_(prefixes == nullptr ? absl::Span<const RowRun>() : prefixes->runs(s)) {}

  // The rows that belong to this sequence first.
  const RowRun& own() const { return own_; }
  // The position of the first of them.
  int64_t start() const { return start_; }
  // The rows of all positions, in ascending order of positions; they live as long as this.
  absl::Span<const RowRun> runs() const {
    return shared_.empty() ? absl::MakeConstSpan(&own_, 1) : shared_;
  }

 private:
  RowRun own_;
  int64_t start_;
  absl::Span<const RowRun> shared_;
};

// Appends the first `count` rows of `runs` to `to`.
void AppendRows(absl::Span<const RowRun> runs, int64_t count, std::vector<RowRun>& to);

// Memory of one layer's attention, in keys and values for each row of the batch: their gradients
// stand apart from those of the rows for so many positions at a time, or those of one sequence
// (shared_keys.h). The copies are as many where sequences have kLeastOwnRows rows of their own.
inline constexpr int64_t kKeysPerRow = 4;
inline constexpr int64_t kLeastOwnRows = 16;

}  // namespace tandem::ops

#endif  // TANDEM_COMMON_OPS_ATTENTION_SHARED_PREFIXES_H_
