#include "common/parallel/pipeline_schedule.h"

#include <algorithm>

namespace tandem::parallel {
namespace {

// The index-th forward or backward action of every stage. With several chunks each is run on as
// many micro-batches as there are stages before the next one is.
PipelineAction Nth(const PipelineShape& shape, bool is_forward, int64_t index) {
  if (shape.chunks == 1) return {.is_forward = is_forward, .chunk = 0, .micro_batch = index};
  const int64_t group = shape.stages * shape.chunks;
  const int64_t chunk = index % group / shape.stages;
  return {.is_forward = is_forward,
          .chunk = is_forward ? chunk : shape.chunks - 1 - chunk,
          .micro_batch = index / group * shape.stages + index % shape.stages};
}

// Forward actions before the first backward one.
int64_t WarmUp(const PipelineShape& shape, int64_t stage) {
  const int64_t after = shape.stages - 1 - stage;
  return shape.chunks == 1 ? after : 2 * after + (shape.chunks - 1) * shape.stages;
}

}  // namespace

BlockRange BlocksOfChunk(int64_t layers, const PipelineShape& shape, int64_t stage, int64_t chunk) {
  const int64_t parts = shape.stages * shape.chunks, part = chunk * shape.stages + stage;
  const int64_t even = layers / parts, more = layers % parts;
  const auto first_layer = [&](int64_t of) { return of * even + std::min(of, more); };
  return {.begin = part == 0 ? 0 : first_layer(part) + 1,
          .end = first_layer(part + 1) + (part + 1 == parts ? 2 : 1)};
}

std::vector<PipelineAction> PipelineSchedule(const PipelineShape& shape, int64_t count,
                                             int64_t stage) {
  // The interleaved order is made for whole groups of micro-batches: those that are not there are
  // left out, which leaves no wait that was not there before.
  const int64_t groups = (count + shape.stages - 1) / shape.stages;
  const int64_t total = shape.chunks == 1 ? count : groups * shape.stages * shape.chunks;
  const int64_t warm_up = std::min(WarmUp(shape, stage), total);
  std::vector<PipelineAction> actions;
  const auto add = [&](bool is_forward, int64_t index) {
    const PipelineAction action = Nth(shape, is_forward, index);
    if (action.micro_batch < count) actions.push_back(action);
  };
  for (int64_t i = 0; i < warm_up; ++i) add(true, i);
  for (int64_t i = warm_up; i < total; ++i) {
    add(true, i);
    add(false, i - warm_up);
  }
  for (int64_t i = total - warm_up; i < total; ++i) add(false, i);
  return actions;
}

}  // namespace tandem::parallel
