// Cutting a global batch into pieces that fit into memory.
#ifndef TANDEM_COMMON_TRAINING_MICRO_BATCHES_H_
#define TANDEM_COMMON_TRAINING_MICRO_BATCHES_H_

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "common/training/sequence_range.h"

namespace tandem::training {

// The sequences of one pass.
using MicroBatch = SequenceRange;

// Consecutive runs of sequences with at most `token_budget` tokens each; a sequence that is longer
// gets its own. The order is kept, so the result depends on the batch alone. Sequences of length 0
// take no room; a run of nothing but those is left out.
//
// `ranks` that take the micro-batches by turns have work for the same number of turns, each turn as
// even as that allows: the largest micro-batch is the smallest that needs no turn more.
std::vector<MicroBatch> PlanMicroBatches(absl::Span<const int64_t> lengths, int64_t token_budget,
                                         int64_t ranks = 1);

}  // namespace tandem::training

#endif  // TANDEM_COMMON_TRAINING_MICRO_BATCHES_H_
