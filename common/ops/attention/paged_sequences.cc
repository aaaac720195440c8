#include "common/ops/attention/paged_sequences.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <map>
#include <utility>

namespace tandem::ops {

PagedRows PlanPagedRows(const std::vector<int64_t>& offsets, const std::vector<int64_t>& starts,
                        const at::Tensor& block_table, int64_t block_tokens, at::Device device) {
  struct Group {
    std::vector<int64_t> rows, sequences, positions;
    int64_t blocks = 0;
  };
  // By the number of bits of their number of blocks: of what is read for a group, less than half
  // belongs to no sequence.
  std::map<int, Group> groups;
  std::vector<int64_t> blocks, places;
  for (size_t s = 0; s < starts.size(); ++s) {
    const int64_t begin = offsets[s], end = offsets[s + 1], sequence = static_cast<int64_t>(s);
    const int32_t* table = block_table.const_data_ptr<int32_t>() + sequence * block_table.size(1);
    for (int64_t row = begin; row < end; ++row) {
      const int64_t position = starts[s] + row - begin;
      blocks.push_back(table[position / block_tokens]);
      places.push_back(position % block_tokens);
    }
    if (end - begin != 1) continue;
    const int64_t count = starts[s] / block_tokens + 1;
    Group& group = groups[std::bit_width(static_cast<uint64_t>(count))];
    group.rows.push_back(begin);
    group.sequences.push_back(sequence);
    group.positions.push_back(starts[s]);
    group.blocks = std::max(group.blocks, count);
  }
  std::vector<int64_t> all = blocks;
  all.insert(all.end(), places.begin(), places.end());
  for (const auto& [_, group] : groups) {
    for (const auto* numbers : {&group.rows, &group.sequences, &group.positions}) {
      all.insert(all.end(), numbers->begin(), numbers->end());
    }
  }
  const at::Tensor uploaded = at::tensor(all, at::kLong).to(device);
  int64_t taken = 0;
  const auto take = [&](size_t count) {
    const auto size = static_cast<int64_t>(count);
    return uploaded.narrow(0, std::exchange(taken, taken + size), size);
  };
  PagedRows result = {.blocks = take(blocks.size()), .places = take(places.size()), .singles = {}};
  for (const auto& [_, group] : groups) {
    const size_t count = group.rows.size();
    result.singles.push_back({.rows = take(count),
                              .sequences = take(count),
                              .positions = take(count),
                              .blocks = group.blocks});
  }
  return result;
}

}  // namespace tandem::ops
