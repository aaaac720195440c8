#include "common/ops/attention/device_attention.h"

#include <ATen/ATen.h>

#include <cstddef>
#include <cstring>
#include <limits>
#include <memory>
#include <utility>

#include "common/kernels/device_kernels.h"
#include "common/kernels/paged_plan.h"
#include "common/ops/attention/aten_attention.h"
#include "common/ops/attention/gathered_keys.h"
#include "common/ops/attention/varlen_attention.h"
#include "common/ops/device_kernels.h"
#include "common/ops/packed.h"
#include "common/ops/products/fixed_rows.h"
#include "common/tensor/aten/device_copies.h"

namespace tandem::ops {
namespace {

using kernels::DevicePagedItem;
using kernels::DevicePartialRow;

bool IsBfloat16(const at::Tensor& x) { return x.scalar_type() == at::kBFloat16; }
bool IsFloatOrBfloat16(at::ScalarType type) { return type == at::kBFloat16 || type == at::kFloat; }

// Returns the plan of the rows of sequences with at most `max_rows` of them, uploaded in one copy.
const PagedKernelPlan& PlanOf(const std::vector<int64_t>& offsets, const PagedSequences& sequences,
                              const kernels::PagedPlanOptions& options) {
  const std::pair key(options.window, options.group);
  const auto known = sequences.kernel_plans.find(key);
  if (known != sequences.kernel_plans.end()) return known->second;
  const kernels::PagedPlan plan = kernels::PlanPagedAttention(offsets, sequences.starts, options);
  const size_t item_bytes = plan.items.size() * sizeof(DevicePagedItem);
  const size_t row_bytes = plan.partial_rows.size() * sizeof(DevicePartialRow);
  const at::Tensor numbers =
      at::empty({static_cast<int64_t>((item_bytes + row_bytes) / sizeof(int32_t))}, at::kInt);
  auto* const bytes = static_cast<char*>(numbers.mutable_data_ptr());
  if (item_bytes > 0) std::memcpy(bytes, plan.items.data(), item_bytes);
  if (row_bytes > 0) std::memcpy(bytes + item_bytes, plan.partial_rows.data(), row_bytes);
  return sequences.kernel_plans
      .emplace(key,
               PagedKernelPlan{.numbers = CopyToDevice(numbers, sequences.block_table.device()),
                               .items = std::ssize(plan.items),
                               .partial_rows = std::ssize(plan.partial_rows),
                               .partials = plan.partials})
      .first->second;
}

}  // namespace

bool HasDeviceAttention(const at::Tensor& q, const at::Tensor& key_cache,
                        const at::Tensor& value_cache) {
  return HasDeviceAttention(q.device(), q.scalar_type(), key_cache.scalar_type(), q.size(2)) &&
         key_cache.sizes() == value_cache.sizes() &&
         key_cache.size(2) == kernels::kPagedBlockTokens && key_cache.is_contiguous() &&
         value_cache.is_contiguous();
}

bool HasDeviceAttention(at::Device device, at::ScalarType type, at::ScalarType cache_type,
                        int64_t head_dim) {
  return DeviceKernelsOf(device).paged_attention != nullptr && IsFloatOrBfloat16(type) &&
         IsFloatOrBfloat16(cache_type) && head_dim <= kernels::kPagedMaxHeadDim;
}

at::Tensor DeviceCachedAttention(const at::Tensor& q_in, const at::Tensor& k_in,
                                 const at::Tensor& v_in, const std::vector<int64_t>& offsets,
                                 const PagedSequences& sequences, const at::Tensor& key_cache,
                                 const at::Tensor& value_cache, const AttentionScores& scores) {
  TORCH_CHECK(sequences.rows.blocks.defined(), "the rows of the pass are not planned");
  const kernels::DeviceKernels& table = DeviceKernelsOf(q_in.device());
  const at::Tensor q = HeadsPacked(q_in), k = HeadsPacked(k_in), v = HeadsPacked(v_in);
  const int64_t heads = q.size(1), kv_heads = k.size(1), head_dim = q.size(2);
  Launch("cache", q.device(), table.cache_write,
         {.keys = k.const_data_ptr(),
          .key_row_stride = k.stride(0),
          .values = v.const_data_ptr(),
          .value_row_stride = v.stride(0),
          .blocks = sequences.rows.blocks.const_data_ptr<int64_t>(),
          .places = sequences.rows.places.const_data_ptr<int64_t>(),
          .key_cache = key_cache.mutable_data_ptr(),
          .value_cache = value_cache.mutable_data_ptr(),
          .rows = q.size(0),
          .kv_heads = kv_heads,
          .head_dim = head_dim,
          .bfloat16 = IsBfloat16(k),
          .cache_bfloat16 = IsBfloat16(key_cache)});
  const bool shares = ProductRows() == 0 && HasVarlenAttention(q, scores);
  const int64_t item_numbers = kernels::PartialNumbers(heads, kv_heads, head_dim);
  const PagedKernelPlan& plan =
      PlanOf(offsets, sequences,
             {.group = heads / kv_heads,
              .window = scores.window,
              .max_partials = kernels::kPartialNumbers / item_numbers,
              .max_rows = shares ? kFewRows : std::numeric_limits<int64_t>::max()});
  const auto attend_others = [&](const at::Tensor& out) {
    return AttendRuns(q, offsets, sequences, key_cache, value_cache, scores, kGatheredNumbers,
                      kFewRows + 1, out);
  };
  if (plan.items == 0) return attend_others({});
  const at::Tensor out = at::empty({q.size(0), heads * head_dim}, q.options());
  const int64_t partials = plan.partials * kernels::PagedRowsPerItem(heads / kv_heads) * heads;
  // Outputs first: a kernel writes four numbers of them at a time.
  const at::Tensor partial =
      at::empty({plan.partials * item_numbers}, q.options().dtype(at::kFloat));
  auto* const partial_outputs = partial.mutable_data_ptr<float>();
  float* const highest = partial_outputs + partial.numel() - 2 * partials;
  const auto* const items =
      reinterpret_cast<const DevicePagedItem*>(plan.numbers.const_data_ptr<int32_t>());
  const kernels::DevicePagedAttentionArgs args = {
      .queries = q.const_data_ptr(),
      .row_stride = q.stride(0),
      .key_cache = key_cache.const_data_ptr(),
      .value_cache = value_cache.const_data_ptr(),
      .block_table = sequences.block_table.const_data_ptr<int32_t>(),
      .table_width = sequences.block_table.size(1),
      .items = items,
      .num_items = plan.items,
      .partial_rows = reinterpret_cast<const DevicePartialRow*>(items + plan.items),
      .num_partial_rows = plan.partial_rows,
      .counts = plan.counts.defined() ? plan.counts.const_data_ptr<int32_t>() : nullptr,
      .rows_per_item = kernels::PagedRowsPerItem(heads / kv_heads),
      .highest = highest,
      .sums = highest + partials,
      .partial_outputs = partial_outputs,
      .outputs = out.mutable_data_ptr(),
      .heads = heads,
      .kv_heads = kv_heads,
      .head_dim = head_dim,
      .window = scores.window,
      .scale = static_cast<float>(scores.ScaleOf(head_dim)),
      .soft_cap = static_cast<float>(scores.soft_cap.value_or(0)),
      .bfloat16 = IsBfloat16(q),
      .cache_bfloat16 = IsBfloat16(key_cache)};
  Launch("attention", q.device(), table.paged_attention, args);
  if (plan.partial_rows > 0) Launch("attention", q.device(), table.fold_partials, args);
  return shares ? attend_others(out) : out;
}

bool AttendsByRow(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                  const SequenceTables& tables) {
  return ProductRows() > 0 && tables.prefixes == nullptr && k.sizes() == v.sizes() &&
         HasDeviceAttention(q.device(), q.scalar_type(), k.scalar_type(), q.size(2));
}

at::Tensor DeviceCausalAttention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                 const std::vector<int64_t>& offsets, const AttentionScores& scores,
                                 const SequenceTables& tables) {
  const std::shared_ptr<const PagedSequences> sequences =
      tables.own_blocks != nullptr ? tables.own_blocks : PlanOwnBlocks(offsets, q.device());
  const at::Tensor caches = at::empty(
      {2, NumOwnBlocks(offsets), k.size(1), kernels::kPagedBlockTokens, k.size(2)}, k.options());
  return DeviceCachedAttention(q, k, v, offsets, *sequences, caches[0], caches[1], scores);
}

}  // namespace tandem::ops
