// Sequences of about one length side by side, as more heads of one sequence: attention of ATen,
// which knows neither the length of a sequence nor where it begins, then takes them in one
// operation.
#ifndef TANDEM_COMMON_OPS_ATTENTION_PADDED_SEQUENCES_H_
#define TANDEM_COMMON_OPS_ATTENTION_PADDED_SEQUENCES_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace tandem::ops {

// Sequences with more rows than this stand alone: each is work enough for an operation.
inline constexpr int64_t kMaxPaddedRows = 1024;

// Returns the class of lengths that are padded to the longest of them: at most four times as long,
// or 16.
int LengthClass(int64_t rows);

// N sequences, padded at their ends to R rows. A row attends to earlier rows of its sequence alone,
// so what padding holds changes no output of a row.
struct PaddedSequences {
  // The rows of a sequence in the batch.
  struct Range {
    int64_t begin, rows;
  };
  std::vector<Range> ranges;
  int64_t count = 0, rows = 0;  // N, R
  at::Tensor padded;    // [R N] int64: a row of the batch for each place; undefined where N is 1
  at::Tensor places;    // [n] int64: the place r N + s of each row, one sequence after the other
  at::Tensor in_batch;  // [n] int64: the same rows in the batch

  // Returns the rows of x [T, heads, D], those of its sequences as heads: [R, N heads, D]. Padding
  // repeats the last row of a sequence. Differentiable.
  at::Tensor Pad(const at::Tensor& x) const;
  // The same with 0 as padding. No autograd.
  at::Tensor PadWithZeros(const at::Tensor& x) const;
  // Returns the n rows of padded ones x [R, N width], one sequence after the other: [n, width].
  // Differentiable.
  at::Tensor Rows(const at::Tensor& x) const;
  // Copies those rows of x [R, N heads, D] to their places in `batch` [T, heads, D].
  void CopyRows(const at::Tensor& x, const at::Tensor& batch) const;
};

// Divides the sequences that have rows, sequence s the rows [offsets[s], offsets[s + 1]), by
// LengthClass, and so that no part has more than `max_scores` pairs of rows for each of `heads`
// heads, but for a sequence alone.
std::vector<PaddedSequences> PadByLength(const std::vector<int64_t>& offsets, int64_t heads,
                                         int64_t max_scores, at::Device device);

}  // namespace tandem::ops

#endif  // TANDEM_COMMON_OPS_ATTENTION_PADDED_SEQUENCES_H_
