#include "common/ops/attention/paged_sequences.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <map>
#include <memory>
#include <optional>
#include <utility>

#include "common/kernels/device_kernels.h"
#include "common/ops/attention/padded_sequences.h"
#include "common/tensor/aten/device_copies.h"

namespace tandem::ops {
namespace {

// Returns the blocks of the rows of a whole sequence.
int64_t BlocksOf(const std::vector<int64_t>& offsets, int64_t sequence) {
  const auto s = static_cast<size_t>(sequence);
  return (offsets[s + 1] - offsets[s] + kernels::kPagedBlockTokens - 1) /
         kernels::kPagedBlockTokens;
}

}  // namespace

PagedRows PlanPagedRows(const std::vector<int64_t>& offsets, const std::vector<int64_t>& starts,
                        const at::Tensor& block_table, int64_t block_tokens, at::Device device) {
  struct Group {
    std::vector<int64_t> rows, sequences, positions, counts;
    int64_t blocks = 0, rows_each = 1;
  };
  // A CPU reads one sequence after the other faster than padding.
  const int64_t most = device.is_cpu() ? 1 : kMaxPaddedRows;
  // By the class of their number of rows, single ones for themselves, and the number of bits of
  // their number of blocks: of what is read for a group, less than half belongs to no sequence.
  std::map<std::pair<int, int>, Group> groups;
  std::vector<int64_t> blocks, places;
  for (size_t s = 0; s < starts.size(); ++s) {
    const int64_t begin = offsets[s], end = offsets[s + 1], sequence = static_cast<int64_t>(s);
    const int32_t* table = block_table.const_data_ptr<int32_t>() + sequence * block_table.size(1);
    for (int64_t row = begin; row < end; ++row) {
      const int64_t position = starts[s] + row - begin;
      blocks.push_back(table[position / block_tokens]);
      places.push_back(position % block_tokens);
    }
    const int64_t rows = end - begin;
    if (rows < 1 || rows > most) continue;
    const int64_t count = (starts[s] + rows - 1) / block_tokens + 1;
    const int row_class = rows == 1 ? -1 : LengthClass(rows);
    Group& group = groups[{row_class, std::bit_width(static_cast<uint64_t>(count))}];
    group.rows.push_back(begin);
    group.sequences.push_back(sequence);
    group.positions.push_back(starts[s]);
    group.counts.push_back(rows);
    group.blocks = std::max(group.blocks, count);
    group.rows_each = std::max(group.rows_each, rows);
  }
  std::vector<int64_t> all = blocks;
  all.insert(all.end(), places.begin(), places.end());
  for (const auto& [_, group] : groups) {
    for (const auto* numbers : {&group.rows, &group.sequences, &group.positions, &group.counts}) {
      all.insert(all.end(), numbers->begin(), numbers->end());
    }
  }
  const at::Tensor uploaded = CopyToDevice(all, device);
  int64_t taken = 0;
  const auto take = [&](size_t count) {
    const auto size = static_cast<int64_t>(count);
    return uploaded.narrow(0, std::exchange(taken, taken + size), size);
  };
  PagedRows result;
  result.blocks = take(blocks.size());
  result.places = take(places.size());
  result.most_together = most;
  for (const auto& [_, group] : groups) {
    const size_t count = group.rows.size();
    result.together.push_back({.rows = take(count),
                               .sequences = take(count),
                               .positions = take(count),
                               .counts = take(count),
                               .blocks = group.blocks,
                               .rows_each = group.rows_each});
  }
  return result;
}

std::shared_ptr<const PagedSequences> PlanOwnBlocks(const std::vector<int64_t>& offsets,
                                                    at::Device device) {
  const int64_t count = std::ssize(offsets) - 1;
  int64_t width = 1;
  for (int64_t s = 0; s < count; ++s) width = std::max(width, BlocksOf(offsets, s));
  const at::Tensor table = at::zeros({count, width}, at::kInt);
  auto* const blocks = table.mutable_data_ptr<int32_t>();
  int32_t next = 0;
  for (int64_t s = 0; s < count; ++s) {
    for (int64_t i = 0; i < BlocksOf(offsets, s); ++i) blocks[s * width + i] = next++;
  }
  const std::vector<int64_t> starts(static_cast<size_t>(count), 0);
  return std::make_shared<const PagedSequences>(PagedSequences{
      .starts = starts,
      .block_table = CopyToDevice(table, device),
      .rows = PlanPagedRows(offsets, starts, table, kernels::kPagedBlockTokens, device)});
}

int64_t NumOwnBlocks(const std::vector<int64_t>& offsets) {
  int64_t blocks = 0;
  for (int64_t s = 0; s + 1 < std::ssize(offsets); ++s) blocks += BlocksOf(offsets, s);
  return blocks;
}

std::vector<KeyRun> PlanKeyRuns(const std::vector<int64_t>& offsets,
                                const PagedSequences& sequences, int64_t block_tokens,
                                int64_t window, int64_t max_keys, int64_t min_rows) {
  const at::Tensor& table = sequences.block_table;
  const at::Device device = table.device();
  const int64_t table_width = table.size(1), total = std::ssize(sequences.starts);
  std::vector<KeyRun> runs;
  for (int64_t next = 0; next < total;) {
    KeyRun run;
    std::vector<int64_t> row_offsets = {0}, key_offsets = {0}, counts, shifts, tables, indices;
    for (; next < total; ++next) {
      const int64_t rows = offsets[next + 1] - offsets[next];
      if (rows == 0 || rows < min_rows) continue;
      const int64_t first = FirstKey(sequences.starts[next], window);
      const int64_t keys = sequences.starts[next] + rows - first;
      if (!counts.empty() && key_offsets.back() + keys > max_keys) break;
      counts.push_back(keys);
      shifts.push_back(first - key_offsets.back());
      tables.push_back(next * table_width);
      row_offsets.push_back(row_offsets.back() + rows);
      key_offsets.push_back(key_offsets.back() + keys);
      for (int64_t row = offsets[next]; row < offsets[next + 1]; ++row) indices.push_back(row);
      run.sequences.longest_rows = std::max(run.sequences.longest_rows, rows);
      run.sequences.longest_keys = std::max(run.sequences.longest_keys, keys);
    }
    if (counts.empty()) break;
    run.row = indices.front();
    run.rows = row_offsets.back();
    if (indices.back() - run.row == run.rows - 1) indices.clear();  // no others between them
    std::vector<int64_t> all;
    for (const auto* numbers : {&row_offsets, &key_offsets, &counts, &shifts, &tables, &indices}) {
      all.insert(all.end(), numbers->begin(), numbers->end());
    }
    const at::Tensor uploaded = CopyToDevice(all, device);
    const auto count = std::ssize(counts);
    const at::Tensor limits = uploaded.narrow(0, 0, 2 * (count + 1)).to(at::kInt);
    run.sequences.row_offsets = limits.narrow(0, 0, count + 1);
    run.sequences.key_offsets = limits.narrow(0, count + 1, count + 1);
    const at::Tensor of_sequence = uploaded.narrow(0, 2 * (count + 1), 3 * count).view({3, count});
    if (!indices.empty()) {
      run.row_indices = uploaded.narrow(0, 2 * (count + 1) + 3 * count, run.rows);
    }
    const at::Tensor sequence =
        at::repeat_interleave(of_sequence[0], std::optional(key_offsets.back()));
    const at::Tensor of_key = of_sequence.narrow(0, 1, 2).index_select(1, sequence);
    const at::Tensor position = at::arange(key_offsets.back(), of_key.options()).add_(of_key[0]);
    run.blocks = table.view({-1})
                     .index_select(0, position.div(block_tokens, "floor").add_(of_key[1]))
                     .to(at::kLong);
    run.places = position.remainder_(block_tokens);
    runs.push_back(std::move(run));
  }
  return runs;
}

}  // namespace tandem::ops
