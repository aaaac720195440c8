// The updates of a step: how often it goes through its samples, and in how many parts.
#ifndef TANDEM_COMMON_TRAINING_MINI_BATCHES_H_
#define TANDEM_COMMON_TRAINING_MINI_BATCHES_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"

namespace tandem::training {

struct UpdateOptions {
  int64_t num_mini_batches = 1;  // updates that go through the batch once
  int64_t num_epochs = 1;        // times that it is gone through

  bool operator==(const UpdateOptions&) const = default;
};

// The samples [begin, end) of one update.
struct MiniBatch {
  size_t begin = 0;
  size_t end = 0;

  bool operator==(const MiniBatch&) const = default;
};

// INVALID_ARGUMENT "num_mini_batches" or "num_epochs".
absl::Status CheckUpdateOptions(const UpdateOptions& options);

// The parts of the batch in the order of the samples, as equal as can be: at most one for each
// sample.
std::vector<MiniBatch> SplitIntoMiniBatches(size_t num_samples, const UpdateOptions& options);

}  // namespace tandem::training

#endif  // TANDEM_COMMON_TRAINING_MINI_BATCHES_H_
