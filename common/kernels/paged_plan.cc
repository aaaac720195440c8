#include "common/kernels/paged_plan.h"

#include <algorithm>
#include <cstddef>

#include "common/kernels/attention_window.h"

namespace tandem::kernels {
namespace {

// The rows of a longer sequence are enough work for a GPU without dividing their keys.
constexpr int64_t kDividedRows = 64;

}  // namespace

int64_t PartialNumbers(int64_t heads, int64_t kv_heads, int64_t head_dim) {
  const int64_t outputs = (head_dim + 3) / 4 * 4;
  return PagedRowsPerItem(heads / kv_heads) * heads * (outputs + 2);
}

PagedPlan PlanPagedAttention(std::span<const int64_t> offsets, std::span<const int64_t> starts,
                             const PagedPlanOptions& options) {
  const int64_t step = PagedRowsPerItem(options.group);
  const auto split_of = [](int64_t position) {
    return static_cast<int32_t>(position / kPagedSplitKeys);
  };
  PagedPlan plan;
  for (size_t s = 0; s < starts.size(); ++s) {
    const int64_t total = offsets[s + 1] - offsets[s];
    if (total > options.max_rows) continue;
    for (int64_t begin = 0; begin < total; begin += step) {
      const int64_t position = starts[s] + begin, rows = std::min(step, total - begin);
      DevicePagedItem item = {
          .sequence = static_cast<int32_t>(s),
          .row = static_cast<int32_t>(offsets[s] + begin),
          .position = static_cast<int32_t>(position),
          .rows = static_cast<int32_t>(rows),
          .first_split = split_of(FirstKey(position, options.window)),
          .end_split = split_of(position + rows - 1) + 1,
          .partial = -1,
      };
      const int32_t splits = item.end_split - item.first_split;
      if (splits == 1 || total > kDividedRows || plan.partials + splits > options.max_partials) {
        plan.items.push_back(item);
        continue;
      }
      const int32_t base = static_cast<int32_t>(plan.partials) - item.first_split;
      for (int32_t row = 0; row < item.rows; ++row) {
        plan.partial_rows.push_back(
            {.row = item.row + row, .position = item.position + row, .place = row, .base = base});
      }
      const int32_t end = item.end_split;
      for (; item.first_split < end; ++item.first_split) {
        item.end_split = item.first_split + 1;
        item.partial = base + item.first_split;
        plan.items.push_back(item);
      }
      plan.partials += splits;
    }
  }
  return plan;
}

}  // namespace tandem::kernels
