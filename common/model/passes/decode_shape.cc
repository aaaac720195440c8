#include "common/model/passes/decode_shape.h"

#include <algorithm>
#include <utility>

#include "common/kernels/device_kernels.h"
#include "common/kernels/paged_plan.h"

namespace tandem {

DecodeLayout::DecodeLayout(const DecodeShape& shape, const std::vector<AttentionPlan>& attention,
                           int64_t max_tokens, int64_t extra_numbers) {
  bytes = 0;
  const auto take = [&](int64_t count, int64_t item_bytes) {
    return std::exchange(bytes, bytes + count * item_bytes);
  };
  constexpr int64_t kLong = 8, kInt = 4;
  tokens = take(shape.rows, kLong);
  positions = take(shape.rows, kLong);
  blocks = take(shape.rows, kLong);
  places = take(shape.rows, kLong);
  wanted = take(shape.wanted, kLong);
  extra = take(extra_numbers * shape.wanted, kLong);
  table_width = KvBlocks(max_tokens);
  table = take(shape.rows * table_width, kInt);
  const int64_t splits = (max_tokens + kernels::kPagedSplitKeys - 1) / kernels::kPagedSplitKeys;
  for (const AttentionPlan& plan : attention) {
    const int64_t partials =
        splits == 1 ? 0
                    : std::min(shape.rows * splits, kernels::kPartialNumbers / plan.item_numbers);
    const int64_t items = shape.rows + partials, rows = partials > 0 ? shape.rows : 0;
    const int64_t counts = take(2, kInt);
    plans.push_back({.counts = counts,
                     .items = take(items, sizeof(kernels::DevicePagedItem)),
                     .num_items = items,
                     .num_rows = rows,
                     .partials = partials});
    take(rows, sizeof(kernels::DevicePartialRow));
  }
}

std::vector<AttentionPlan> AttentionPlans(const std::vector<LayerCache>& layers, int64_t heads) {
  std::vector<AttentionPlan> plans;
  for (const LayerCache& layer : layers) {
    const int64_t group = heads / layer.heads;
    if (std::ranges::any_of(plans, [&](const AttentionPlan& plan) {
          return plan.window == layer.window && plan.group == group;
        })) {
      continue;
    }
    plans.push_back({.window = layer.window,
                     .group = group,
                     .item_numbers = kernels::PartialNumbers(heads, layer.heads, layer.head_dim)});
  }
  return plans;
}

}  // namespace tandem
