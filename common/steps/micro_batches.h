// Micro-batches: the runs of sequences that a batch is cut into, so that each fits into memory.
#ifndef TANDEM_COMMON_STEPS_MICRO_BATCHES_H_
#define TANDEM_COMMON_STEPS_MICRO_BATCHES_H_

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "common/steps/sequence_range.h"

namespace tandem::training {

// The sequences of one pass.
using MicroBatch = SequenceRange;

// Cuts the sequences into consecutive micro-batches of at most `token_budget` tokens; a longer
// sequence gets a micro-batch of its own. Sequences of length 0 take no room, and a micro-batch of
// nothing else is left out. The order is kept, so the result depends on the batch alone.
//
// `ranks` ranks take the micro-batches in turn. The plan needs as few turns as the budget allows,
// and among such plans its largest micro-batch is the smallest.
//
// With `shared`, parallel to `lengths`, a sequence has its first shared[s] tokens in common with
// the last sequence before it that has any; in one micro-batch they count once.
std::vector<MicroBatch> PlanMicroBatches(absl::Span<const int64_t> lengths, int64_t token_budget,
                                         int64_t ranks = 1, absl::Span<const int64_t> shared = {});

}  // namespace tandem::training

#endif  // TANDEM_COMMON_STEPS_MICRO_BATCHES_H_
