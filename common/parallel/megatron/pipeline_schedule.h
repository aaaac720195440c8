// The pipeline's schedule: which stage holds which blocks of a model, and in which order it runs
// them. Pure logic, no communication.
//
// A stage holds one virtual stage, or several (Megatron-LM's model chunks): virtual stage v of
// stage s of p is the model's (v p + s)-th. With one virtual stage per stage the order is 1F1B
// (https://arxiv.org/abs/2006.09503), with several the interleaved schedule of
// https://arxiv.org/abs/2104.04473, section 2.2.
#ifndef TANDEM_COMMON_PARALLEL_MEGATRON_PIPELINE_SCHEDULE_H_
#define TANDEM_COMMON_PARALLEL_MEGATRON_PIPELINE_SCHEDULE_H_

#include <cstdint>
#include <vector>

namespace tandem::parallel {

struct PipelineShape {
  int64_t stages = 1;
  int64_t virtual_stages = 1;  // per stage
};

// A range [begin, end) of the blocks of a pass (common/model/config/parameter_spec.h).
struct BlockRange {
  int64_t begin = 0, end = 0;

  bool Has(int64_t block) const { return begin <= block && block < end; }
};

// Returns the blocks of a virtual stage. Layers are divided evenly; where they do not divide, the
// model's first virtual stages have one more. The first one begins with the embedding (and the
// vision tower), the last one ends with the final norm and the head. `layers`, of which the first
// is block `first_layer`, are at least stages * virtual_stages.
BlockRange BlocksOfVirtualStage(int64_t layers, int64_t first_layer, const PipelineShape& shape,
                                int64_t stage, int64_t virtual_stage);

struct PipelineAction {
  bool is_forward = true;
  int64_t virtual_stage = 0;
  int64_t micro_batch = 0;

  bool operator==(const PipelineAction&) const = default;
};

// Number of sends from one stage to another, in one direction, that may be under way before the
// sender waits.
inline constexpr int64_t kSendsInFlight = 2;

// Returns the actions of `stage` for micro-batches 0 .. count-1, in order. Stages that follow their
// lists, waiting for what they receive and for room to send, all come to the end. Forward actions
// are in the same order on all stages, and so are backward ones: what a stage receives from
// another, in one direction, comes in the order in which it needs it.
std::vector<PipelineAction> PipelineSchedule(const PipelineShape& shape, int64_t count,
                                             int64_t stage);

}  // namespace tandem::parallel

#endif  // TANDEM_COMMON_PARALLEL_MEGATRON_PIPELINE_SCHEDULE_H_
