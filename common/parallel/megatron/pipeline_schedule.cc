#include "common/parallel/megatron/pipeline_schedule.h"

#include <algorithm>

namespace tandem::parallel {
namespace {

// Returns the index-th forward or backward action of every stage. A virtual stage runs as many
// micro-batches in a row as there are stages.
PipelineAction Nth(const PipelineShape& shape, bool is_forward, int64_t index) {
  if (shape.virtual_stages == 1) {
    return {.is_forward = is_forward, .virtual_stage = 0, .micro_batch = index};
  }
  const int64_t group = shape.stages * shape.virtual_stages;
  const int64_t virtual_stage = index % group / shape.stages;
  return {.is_forward = is_forward,
          .virtual_stage = is_forward ? virtual_stage : shape.virtual_stages - 1 - virtual_stage,
          .micro_batch = index / group * shape.stages + index % shape.stages};
}

// Returns the number of forward actions before the first backward one.
int64_t WarmUp(const PipelineShape& shape, int64_t stage) {
  const int64_t after = shape.stages - 1 - stage;
  return shape.virtual_stages == 1 ? after : 2 * after + (shape.virtual_stages - 1) * shape.stages;
}

}  // namespace

BlockRange BlocksOfVirtualStage(int64_t layers, int64_t first_layer, const PipelineShape& shape,
                                int64_t stage, int64_t virtual_stage) {
  const int64_t positions = shape.stages * shape.virtual_stages,
                position = virtual_stage * shape.stages + stage;
  const int64_t even = layers / positions, more = layers % positions;
  const auto begin = [&](int64_t of) { return first_layer + of * even + std::min(of, more); };
  return {.begin = position == 0 ? 0 : begin(position),
          .end = begin(position + 1) + (position + 1 == positions ? 1 : 0)};
}

std::vector<PipelineAction> PipelineSchedule(const PipelineShape& shape, int64_t count,
                                             int64_t stage) {
  // The interleaved order is made for whole groups of micro-batches. Leaving out the micro-batches
  // beyond `count` adds no wait.
  const int64_t groups = (count + shape.stages - 1) / shape.stages;
  const int64_t total =
      shape.virtual_stages == 1 ? count : groups * shape.stages * shape.virtual_stages;
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
