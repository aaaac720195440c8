#include "common/model/passes/decode_buffers.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <limits>
#include <utility>

#include "common/kernels/device_kernels.h"
#include "common/kernels/paged_plan.h"

namespace tandem {

DecodeBuffers::DecodeBuffers(const std::vector<LayerCache>& layers, int64_t heads,
                             int64_t max_tokens, int64_t extra, at::Device device)
    : plans_(AttentionPlans(layers, heads)), max_tokens_(max_tokens), extra_(extra) {
  const DecodeShape largest = {.rows = kMaxDecodeRows, .wanted = kMaxDecodeRows};
  const int64_t bytes = DecodeLayout(largest, plans_, max_tokens, extra).bytes;
  for (at::Tensor& host : host_) {
    host = at::empty({bytes}, at::dtype(at::kByte).pinned_memory(true));
  }
  device_ = at::empty({bytes}, at::dtype(at::kByte).device(device));
  replaced_ = at::empty({kMaxDecodeRows}, at::dtype(at::kDouble).device(device));
}

void DecodeBuffers::Fill(const DecodeShape& shape, std::span<const DecodeInput> inputs) {
  const DecodeLayout layout(shape, plans_, max_tokens_, extra_);
  filled_ = 1 - filled_;
  auto* const bytes = host_[filled_].mutable_data_ptr<uint8_t>();
  const auto longs = [&](int64_t begin) { return reinterpret_cast<int64_t*>(bytes + begin); };
  const auto ints = [&](int64_t begin) { return reinterpret_cast<int32_t*>(bytes + begin); };
  int64_t *token = longs(layout.tokens), *position = longs(layout.positions);
  int64_t *block = longs(layout.blocks), *place = longs(layout.places);
  int64_t* wanted = longs(layout.wanted);
  int32_t* table = ints(layout.table);
  std::vector<int64_t> offsets = {0}, starts;
  for (const DecodeInput& input : inputs) {
    const int64_t begin = offsets.back(), end = input.start + std::ssize(input.tokens);
    for (const int64_t row : input.output_rows) *wanted++ = begin + row;
    token = std::copy(input.tokens.begin(), input.tokens.end(), token);
    for (int64_t p = input.start; p < end; ++p) {
      *position++ = p;
      *block++ = input.blocks[static_cast<size_t>(p / kKvBlockTokens)];
      *place++ = p % kKvBlockTokens;
    }
    std::copy_n(input.blocks.begin(), KvBlocks(end), table);
    table += layout.table_width;
    starts.push_back(input.start);
    offsets.push_back(begin + end - input.start);
  }
  std::fill(token, longs(layout.tokens) + shape.rows, 0);
  std::fill(position, longs(layout.positions) + shape.rows, 0);
  std::fill(block, longs(layout.blocks) + shape.rows, -1);
  std::fill(place, longs(layout.places) + shape.rows, 0);
  std::fill(wanted, longs(layout.wanted) + shape.wanted, 0);
  for (size_t i = 0; i < plans_.size(); ++i) {
    const DecodeLayout::Plan& room = layout.plans[i];
    const kernels::PagedPlan plan =
        kernels::PlanPagedAttention(offsets, starts,
                                    {.group = plans_[i].group,
                                     .window = plans_[i].window,
                                     .max_partials = room.partials,
                                     .max_rows = std::numeric_limits<int64_t>::max()});
    TORCH_CHECK(
        std::ssize(plan.items) <= room.num_items && std::ssize(plan.partial_rows) <= room.num_rows,
        "a pass of decoding does not fit its buffers");
    ints(room.counts)[0] = static_cast<int32_t>(plan.items.size());
    ints(room.counts)[1] = static_cast<int32_t>(plan.partial_rows.size());
    auto* const items = reinterpret_cast<kernels::DevicePagedItem*>(bytes + room.items);
    std::ranges::copy(plan.items, items);
    std::ranges::copy(plan.partial_rows,
                      reinterpret_cast<kernels::DevicePartialRow*>(items + room.num_items));
  }
}

std::span<double> DecodeBuffers::Extra(const DecodeShape& shape) {
  const DecodeLayout layout(shape, plans_, max_tokens_, extra_);
  return {reinterpret_cast<double*>(host_[filled_].mutable_data_ptr<uint8_t>() + layout.extra),
          static_cast<size_t>(extra_ * shape.wanted)};
}

void DecodeBuffers::Upload(const DecodeShape& shape) {
  const int64_t bytes = DecodeLayout(shape, plans_, max_tokens_, extra_).bytes;
  device_.narrow(0, 0, bytes).copy_(host_[filled_].narrow(0, 0, bytes), /*non_blocking=*/true);
}

void DecodeBuffers::ReplaceTokens(const DecodeShape& shape, int64_t rows, const at::Tensor& drawn) {
  const DecodeLayout layout(shape, plans_, max_tokens_, extra_);
  const at::Tensor tokens = device_.narrow(0, layout.tokens, rows * 8).view(at::kLong);
  at::Tensor replaced = replaced_.narrow(0, 0, rows);
  at::index_select_out(replaced, drawn, 0, tokens);
  tokens.copy_(replaced);
}

DecodeBatch DecodeBuffers::Batch(const DecodeShape& shape) const {
  const DecodeLayout layout(shape, plans_, max_tokens_, extra_);
  const auto longs = [&](int64_t begin, int64_t count) {
    return device_.narrow(0, begin, count * 8).view(at::kLong);
  };
  const auto ints = [&](int64_t begin, int64_t count) {
    return device_.narrow(0, begin, count * 4).view(at::kInt);
  };
  DecodeBatch decode = {
      .batch = {.tokens = longs(layout.tokens, shape.rows),
                .positions = longs(layout.positions, shape.rows),
                .offsets = {0, shape.rows},
                .positions_end = max_tokens_},
      .sequences = {.starts = {},
                    .block_table = ints(layout.table, shape.rows * layout.table_width)
                                       .view({shape.rows, layout.table_width}),
                    .rows = {.blocks = longs(layout.blocks, shape.rows),
                             .places = longs(layout.places, shape.rows),
                             .together = {}}},
      .wanted = longs(layout.wanted, shape.wanted)};
  for (size_t i = 0; i < plans_.size(); ++i) {
    const DecodeLayout::Plan& room = layout.plans[i];
    constexpr int64_t kItem = sizeof(kernels::DevicePagedItem) / 4;
    constexpr int64_t kRow = sizeof(kernels::DevicePartialRow) / 4;
    decode.sequences.kernel_plans.emplace(
        std::pair(plans_[i].window, plans_[i].group),
        ops::PagedKernelPlan{
            .numbers = ints(room.items, room.num_items * kItem + room.num_rows * kRow),
            .counts = ints(room.counts, 2),
            .items = room.num_items,
            .partial_rows = room.num_rows,
            .partials = room.partials});
  }
  return decode;
}

at::Tensor DecodeBuffers::DeviceExtra(const DecodeShape& shape) const {
  const DecodeLayout layout(shape, plans_, max_tokens_, extra_);
  return device_.narrow(0, layout.extra, extra_ * shape.wanted * 8)
      .view(at::kDouble)
      .view({extra_, shape.wanted});
}

}  // namespace tandem
