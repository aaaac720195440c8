// The division of a linear map among threads.
#ifndef TANDEM_COMMON_OPS_PRODUCTS_PARALLEL_LINEAR_H_
#define TANDEM_COMMON_OPS_PRODUCTS_PARALLEL_LINEAR_H_

#include <ATen/Parallel.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <iterator>

#include "absl/container/inlined_vector.h"
#include "common/kernels/cpu/cpu_kernels.h"
#include "common/kernels/weight_format.h"
#include "common/ops/products/linear_tile.h"
#include "common/ops/threads/parallel_for.h"
#include "common/ops/threads/thread_team.h"

namespace tandem::ops {

// Returns where the ranges end into which `threads` threads divide `count` panels, each range taken
// by whoever is free: long ranges first and short ones last, so that the threads end together, and
// all of them of lengths that the kernels multiply at once.
inline absl::InlinedVector<int64_t, 32> PanelRanges(int64_t count, int threads) {
  constexpr int64_t kTile = 8;   // panels of the widest register tile
  constexpr int64_t kShort = 2;  // a panel alone waits for each of its sums
  absl::InlinedVector<int64_t, 32> ends;
  for (int64_t begin = 0; begin < count; begin = ends.back()) {
    const int64_t left = count - begin, tiles = left / (2 * threads * kTile);
    const auto share = static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(left / threads)));
    const int64_t length = tiles > 0 ? tiles * kTile : std::clamp(share, kShort, kTile);
    ends.push_back(std::min(begin + length, count));
  }
  return ends;
}

// Calls multiply(group, panel_begin, panel_end) for ranges that cover the `panels` panels of each
// of `groups` groups of rows. A panel of a group costs about `work` multiply-adds. Threads divide
// the panels of all groups together.
template <typename Function>
void ParallelPanels(int64_t groups, int64_t panels, int64_t work, const Function& multiply) {
  const int64_t count = groups * panels;
  if (count == 0) return;
  const auto run = [&](int64_t begin, int64_t end) {
    while (begin < end) {
      const int64_t group = begin / panels, last = std::min(end, (group + 1) * panels);
      multiply(group, begin - group * panels, last - group * panels);
      begin = last;
    }
  };
  const int threads = LoopThreads(count, work);
  if (threads == 1) return run(0, count);
  const auto ends = PanelRanges(count, threads);
  ThreadTeam::OfProcess().Run(std::ssize(ends), threads, [&](int64_t range) {
    run(range == 0 ? 0 : ends[range - 1], ends[range]);
  });
}

// Calls multiply(tile) for tiles that cover `rows` rows and `out` outputs of a map of `in` inputs.
// Threads divide the panels; where there are few panels they divide the rows too.
template <typename Function>
void ParallelLinear(int64_t rows, int64_t in, int64_t out, const Function& multiply) {
  constexpr int64_t kMinRows = 24;  // of a chunk
  const int64_t panels = kernels::PanelCount(out);
  if (panels == 0) return;
  const int64_t chunks = std::clamp<int64_t>(2 * at::get_num_threads() / panels, 1,
                                             std::max<int64_t>(1, rows / kMinRows));
  ParallelPanels(chunks, panels, kernels::kPanelOuts * in * rows / chunks,
                 [&](int64_t chunk, int64_t panel_begin, int64_t panel_end) {
                   multiply(LinearTile{.row_begin = chunk * rows / chunks,
                                       .row_end = (chunk + 1) * rows / chunks,
                                       .panel_begin = panel_begin,
                                       .panel_end = panel_end});
                 });
}

// Returns the arguments of a whole map for the rows of a tile.
template <typename Args>
Args RowsOfTile(const Args& whole, const LinearTile& tile) {
  Args args = whole;
  args.x += tile.row_begin * whole.x_stride;
  args.y += tile.row_begin * whole.y_stride;
  args.rows = tile.row_end - tile.row_begin;
  return args;
}

// Returns the arguments that compute a tile of a whole map.
template <typename Number>
kernels::LinearArgs<Number> TileOf(const kernels::LinearArgs<Number>& whole,
                                   const LinearTile& tile) {
  kernels::LinearArgs<Number> args = RowsOfTile(whole, tile);
  args.out_begin = tile.panel_begin * kernels::kPanelOuts;
  args.out_end = std::min(tile.panel_end * kernels::kPanelOuts, whole.out_end);
  return args;
}
template <typename Number>
kernels::PackedLinearArgs<Number> TileOf(const kernels::PackedLinearArgs<Number>& whole,
                                         const LinearTile& tile) {
  kernels::PackedLinearArgs<Number> args = RowsOfTile(whole, tile);
  args.panel_begin = tile.panel_begin;
  args.panel_end = tile.panel_end;
  return args;
}

// Computes a whole map with a kernel, tile by tile.
template <typename Number>
void ParallelLinear(const kernels::LinearArgs<Number>& whole,
                    void (*kernel)(const kernels::LinearArgs<Number>&)) {
  ParallelLinear(whole.rows, whole.in, whole.out_end,
                 [&](const LinearTile& tile) { kernel(TileOf(whole, tile)); });
}
template <typename Number>
void ParallelLinear(const kernels::PackedLinearArgs<Number>& whole,
                    void (*kernel)(const kernels::PackedLinearArgs<Number>&)) {
  ParallelLinear(whole.rows, whole.in, whole.out,
                 [&](const LinearTile& tile) { kernel(TileOf(whole, tile)); });
}

}  // namespace tandem::ops

#endif  // TANDEM_COMMON_OPS_PRODUCTS_PARALLEL_LINEAR_H_
