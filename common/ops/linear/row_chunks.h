// How attention in ATen operations divides the rows of a sequence.
#ifndef TANDEM_COMMON_OPS_LINEAR_ROW_CHUNKS_H_
#define TANDEM_COMMON_OPS_LINEAR_ROW_CHUNKS_H_

#include <ATen/ATen.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "common/kernels/attention_window.h"

namespace tandem::ops {

// Consecutive rows of a sequence and the keys that they attend to, by their positions. The last row
// is that of the last key.
struct RowChunk {
  int64_t row, rows, key, keys;
  int64_t window;

  // Whether the window hides keys of the chunk from its last row.
  bool hides_past() const { return FirstKey(row + rows - 1, window) > key; }
  // Whether the rows are those of the keys, and each attends to all up to its own.
  bool is_causal() const { return row == key && !hides_past(); }
  // Returns what is added to the scores [rows, keys]: 0, or -infinity for a key that the row does
  // not attend to; nothing where is_causal says it, or a single row attends to all keys.
  c10::optional<at::Tensor> Mask(const at::TensorOptions& options) const {
    if (is_causal() || rows == 1) return {};
    const auto hidden = [&] {
      return at::full({rows, keys}, -std::numeric_limits<double>::infinity(), options);
    };
    at::Tensor mask = hidden().triu_(row - key + 1);
    if (hides_past()) mask.add_(hidden().tril_(row - key - window));
    return mask;
  }
};

// Divides the rows from position `begin` to `end` so that those of a chunk have most of their keys
// in common, since what the mask hides is computed, too.
inline std::vector<RowChunk> RowChunks(int64_t begin, int64_t end, int64_t window) {
  constexpr int64_t kMinRows = 256;
  const int64_t step = FirstKey(end - 1, window) == 0 ? end - begin : std::max(window, kMinRows);
  std::vector<RowChunk> chunks;
  for (int64_t row = begin; row < end; row += step) {
    const int64_t key = FirstKey(row, window), row_end = std::min(row + step, end);
    chunks.push_back(
        {.row = row, .rows = row_end - row, .key = key, .keys = row_end - key, .window = window});
  }
  return chunks;
}

}  // namespace tandem::ops

#endif  // TANDEM_COMMON_OPS_LINEAR_ROW_CHUNKS_H_
