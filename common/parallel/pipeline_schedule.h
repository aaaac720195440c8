// Which stage of a pipeline holds which blocks of a model, and in which order it runs them.
//
// A stage holds one part of the model, or several (virtual stages): part c of stage s of p is part
// c p + s of the model. With one part the order is 1F1B (https://arxiv.org/abs/2006.09503), else
// the interleaved schedule of https://arxiv.org/abs/2104.04473, section 2.2.
#ifndef TANDEM_COMMON_PARALLEL_PIPELINE_SCHEDULE_H_
#define TANDEM_COMMON_PARALLEL_PIPELINE_SCHEDULE_H_

#include <cstdint>
#include <vector>

namespace tandem::parallel {

struct PipelineShape {
  int64_t stages = 1;
  int64_t chunks = 1;  // of each stage
};

// [begin, end) of the blocks of a pass (common/model/parameter_spec.h).
struct BlockRange {
  int64_t begin = 0, end = 0;

  bool Has(int64_t block) const { return begin <= block && block < end; }
};

// Layers are shared out evenly; where they do not divide, the first parts have one more. The first
// part begins with the embedding, the last ends with the final norm and the head. `layers` is at
// least stages * chunks.
BlockRange BlocksOfChunk(int64_t layers, const PipelineShape& shape, int64_t stage, int64_t chunk);

struct PipelineAction {
  bool is_forward = true;
  int64_t chunk = 0;
  int64_t micro_batch = 0;

  bool operator==(const PipelineAction&) const = default;
};

// Of what a stage has sent in one direction to one other, as much may be on its way before it
// waits.
inline constexpr int64_t kSendsInFlight = 2;

// What `stage` does with micro-batches 0 .. count-1, any number of them. Stages that follow their
// lists and wait for what they need, and for room to send, come to the end. Forward actions are in
// the same order on all stages, and so are backward ones: what one stage sends another in one
// direction arrives in the order in which it is needed.
std::vector<PipelineAction> PipelineSchedule(const PipelineShape& shape, int64_t count,
                                             int64_t stage);

}  // namespace tandem::parallel

#endif  // TANDEM_COMMON_PARALLEL_PIPELINE_SCHEDULE_H_
