// The updates of a step: how often it goes through its samples, and in how many parts.
#ifndef TANDEM_COMMON_TRAINING_MINI_BATCHES_H_
#define TANDEM_COMMON_TRAINING_MINI_BATCHES_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "common/training/sequence_range.h"

namespace tandem::training {

struct UpdateOptions {
  int64_t num_mini_batches = 1;  // updates that go through the batch once
  int64_t num_epochs = 1;        // times that it is gone through

  bool operator==(const UpdateOptions&) const = default;
};

// The samples of one update.
using MiniBatch = SequenceRange;

// INVALID_ARGUMENT "num_mini_batches" or "num_epochs".
absl::Status CheckUpdateOptions(const UpdateOptions& options);

// The parts of the batch in the order of the samples, as equal as can be: at most one for each
// sample.
std::vector<MiniBatch> SplitIntoMiniBatches(size_t num_samples, const UpdateOptions& options);

}  // namespace tandem::training

#endif  // TANDEM_COMMON_TRAINING_MINI_BATCHES_H_
