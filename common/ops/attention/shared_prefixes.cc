#include "common/ops/attention/shared_prefixes.h"

#include <algorithm>

#include "common/kernels/cpu/cpu_kernels.h"

namespace tandem::ops {
namespace {

// Returns the rows of positions [begin, begin + count).
std::vector<RowRun> Cut(absl::Span<const RowRun> runs, int64_t begin, int64_t count) {
  std::vector<RowRun> cut;
  for (const RowRun& run : runs) {
    if (count == 0) break;
    const int64_t skipped = std::min(begin, run.rows);
    const int64_t rows = std::min(count, run.rows - skipped);
    begin -= skipped;
    count -= rows;
    if (rows > 0) cut.push_back({.row = run.row + skipped, .rows = rows});
  }
  return cut;
}

}  // namespace

void AppendRows(absl::Span<const RowRun> runs, int64_t count, std::vector<RowRun>& to) {
  for (const RowRun& run : Cut(runs, 0, count)) {
    if (!to.empty() && to.back().row + to.back().rows == run.row) {
      to.back().rows += run.rows;
    } else {
      to.push_back(run);
    }
  }
}

SharedPrefixes::SharedPrefixes(const std::vector<int64_t>& offsets,
                               const std::vector<int64_t>& starts)
    : sequences_(starts.size()), num_rows_(offsets.back()) {
  for (size_t s = 0; s < starts.size(); ++s) {
    Sequence& sequence = sequences_[s];
    const RowRun own = {.row = offsets[s], .rows = offsets[s + 1] - offsets[s]};
    sequence.start = starts[s];
    sequence.length = sequence.start + own.rows;
    if (s > 0) AppendRows(sequences_[s - 1].runs, sequence.start, sequence.runs);
    AppendRows({own}, own.rows, sequence.runs);
    AddBlocks(sequence);
  }
}

void SharedPrefixes::AddBlocks(Sequence& sequence) {
  constexpr int64_t kTokens = kernels::kAttentionBlock;
  for (int64_t begin = 0; begin < sequence.length; begin += kTokens) {
    const std::vector<RowRun> runs =
        Cut(sequence.runs, begin, std::min(kTokens, sequence.length - begin));
    if (runs.size() == 1) {
      sequence.blocks.push_back(static_cast<int32_t>(runs[0].row));
      continue;
    }
    sequence.blocks.push_back(static_cast<int32_t>(num_rows_));
    for (const RowRun& run : runs) {
      copies_.push_back({.from = run, .to = num_rows_});
      num_rows_ += run.rows;
    }
  }
}

int64_t SharedPrefixes::RowOf(size_t s, int64_t position) const {
  const std::vector<RowRun>& runs = sequences_[s].runs;
  auto run = runs.begin();
  for (; position >= run->rows; ++run) position -= run->rows;
  return run->row + position;
}

}  // namespace tandem::ops
