#include "common/training/mini_batches.h"

#include <algorithm>

#include "common/base/field_check.h"
#include "common/base/status_macros.h"

namespace tandem::training {
namespace {

// Every update costs a forward and a backward pass: a larger number is a mistake.
constexpr int64_t kMaxUpdates = 1000;

}  // namespace

absl::Status CheckUpdateOptions(const UpdateOptions& options) {
  TANDEM_RETURN_IF_ERROR(
      CheckInRange("num_mini_batches", options.num_mini_batches, 1, kMaxUpdates));
  return CheckInRange("num_epochs", options.num_epochs, 1, kMaxUpdates);
}

std::vector<MiniBatch> SplitIntoMiniBatches(size_t num_samples, const UpdateOptions& options) {
  const size_t count = std::min(num_samples, static_cast<size_t>(options.num_mini_batches));
  std::vector<MiniBatch> batches;
  for (size_t i = 0; i < count; ++i) {
    batches.push_back({.begin = i * num_samples / count, .end = (i + 1) * num_samples / count});
  }
  return batches;
}

}  // namespace tandem::training
