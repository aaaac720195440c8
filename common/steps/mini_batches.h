// The updates of a step: its mini-batches, and how often it goes through them.
#ifndef TANDEM_COMMON_STEPS_MINI_BATCHES_H_
#define TANDEM_COMMON_STEPS_MINI_BATCHES_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "common/steps/sequence_range.h"

namespace tandem::training {

struct UpdateOptions {
  int64_t num_mini_batches = 1;  // updates of one epoch
  int64_t num_epochs = 1;        // passes over the whole batch

  bool operator==(const UpdateOptions&) const = default;
};

// The samples of one update.
using MiniBatch = SequenceRange;

// INVALID_ARGUMENT "num_mini_batches" or "num_epochs".
absl::Status CheckUpdateOptions(const UpdateOptions& options);

// Splits the batch into mini-batches in the order of the samples. There are fewer than
// num_mini_batches where there are fewer samples, and their sizes are as equal as they can be.
// `groups` has the first sample of each group, ascending from 0: a mini-batch has whole groups,
// unless there are fewer groups than mini-batches.
std::vector<MiniBatch> SplitIntoMiniBatches(size_t num_samples, const UpdateOptions& options,
                                            absl::Span<const size_t> groups = {});

}  // namespace tandem::training

#endif  // TANDEM_COMMON_STEPS_MINI_BATCHES_H_
