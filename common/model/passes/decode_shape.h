// The shapes that passes of decoding are padded to (decode_buffers.h), and the memory of their
// numbers. No torch: the memory plan counts it before any exists.
#ifndef TANDEM_COMMON_MODEL_PASSES_DECODE_SHAPE_H_
#define TANDEM_COMMON_MODEL_PASSES_DECODE_SHAPE_H_

#include <compare>
#include <cstdint>
#include <vector>

#include "common/model/passes/layer_cache.h"

namespace tandem {

// The most rows of a pass that is padded.
inline constexpr int64_t kMaxDecodeRows = 256;

// Returns the number of rows that 1 to kMaxDecodeRows rows are padded to: 1, 2, 4, multiples of 8
// up to 64, multiples of 32.
inline int64_t PaddedDecodeRows(int64_t rows) {
  if (rows <= 2) return rows;
  const int64_t step = rows <= 4 ? 4 : rows <= 64 ? 8 : 32;
  return (rows + step - 1) / step * step;
}

// Padded numbers of the rows of a pass, and of those whose logits are wanted.
struct DecodeShape {
  int64_t rows = 0;
  int64_t wanted = 0;

  auto operator<=>(const DecodeShape&) const = default;
};

// The plan of attention (kernels/paged_plan.h) in the layers of one window and head shape.
struct AttentionPlan {
  int64_t window = 0;
  int64_t group = 1;         // query heads that share a key/value head
  int64_t item_numbers = 0;  // of its partial results
};

// The places of a pass's numbers in its bytes: those of 8 bytes, then those of 4.
struct DecodeLayout {
  // The layout for a shape and sequences of at most `max_tokens`, with `extra` numbers beside each
  // wanted row.
  DecodeLayout(const DecodeShape& shape, const std::vector<AttentionPlan>& plans,
               int64_t max_tokens, int64_t extra);

  struct Plan {
    int64_t counts, items;                  // behind the items are the rows with partial results
    int64_t num_items, num_rows, partials;  // room for as many
  };

  int64_t tokens, positions, blocks, places, wanted, extra;  // where they begin, in bytes
  int64_t table, table_width;
  std::vector<Plan> plans;
  int64_t bytes;
};

// Returns the plans that the layers of a model with so many query heads need.
std::vector<AttentionPlan> AttentionPlans(const std::vector<LayerCache>& layers, int64_t heads);

}  // namespace tandem

#endif  // TANDEM_COMMON_MODEL_PASSES_DECODE_SHAPE_H_
