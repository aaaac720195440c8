// The rows of a pass that the kernel paged_attention takes, and their division, which changes no
// bit.
#ifndef TANDEM_COMMON_KERNELS_PAGED_PLAN_H_
#define TANDEM_COMMON_KERNELS_PAGED_PLAN_H_

#include <cstdint>
#include <span>
#include <vector>

#include "common/kernels/device_kernels.h"

namespace tandem::kernels {

// At most this many numbers of partial results in a pass, 67 MB.
inline constexpr int64_t kPartialNumbers = int64_t{1} << 24;

// Returns the numbers of the partial results of an item.
int64_t PartialNumbers(int64_t heads, int64_t kv_heads, int64_t head_dim);

struct PagedPlanOptions {
  int64_t group;   // query heads that share a key/value head
  int64_t window;  // attention_window.h
  // The items with partial results. Where they are too few, an item takes all splits of its rows.
  int64_t max_partials;
  int64_t max_rows;  // sequences with more rows in the pass are left out
};

struct PagedPlan {
  std::vector<DevicePagedItem> items;
  std::vector<DevicePartialRow> partial_rows;
  int64_t partials = 0;
};

// Sequence s has the rows [offsets[s], offsets[s + 1]) of the pass, from position starts[s] on.
PagedPlan PlanPagedAttention(std::span<const int64_t> offsets, std::span<const int64_t> starts,
                             const PagedPlanOptions& options);

}  // namespace tandem::kernels

#endif  // TANDEM_COMMON_KERNELS_PAGED_PLAN_H_
