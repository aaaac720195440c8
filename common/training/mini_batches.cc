#include "common/training/mini_batches.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/field_check.h"
#include "common/base/status_macros.h"

namespace tandem::training {
namespace {

// Every update costs a forward and backward pass: more is a mistake.
constexpr int64_t kMostUpdates = 1000;

}  // namespace

absl::Status CheckUpdateOptions(const UpdateOptions& options) {
  TANDEM_RETURN_IF_ERROR(
      CheckInRange("num_mini_batches", options.num_mini_batches, 1, kMostUpdates));
  return CheckInRange("num_epochs", options.num_epochs, 1, kMostUpdates);
}

absl::Status CheckMiniBatches(const UpdateOptions& options, size_t num_samples) {
  if (options.num_mini_batches <= static_cast<int64_t>(num_samples)) return absl::OkStatus();
  return InvalidField("num_mini_batches",
                      absl::StrCat("must be at most the number of samples, ", num_samples, ", got ",
                                   options.num_mini_batches));
}

std::vector<MiniBatch> SplitIntoMiniBatches(size_t num_samples, const UpdateOptions& options) {
  const size_t parts = std::min(num_samples, static_cast<size_t>(options.num_mini_batches));
  std::vector<MiniBatch> batches;
  for (size_t i = 0; i < parts; ++i) {
    batches.push_back({.begin = i * num_samples / parts, .end = (i + 1) * num_samples / parts});
  }
  return batches;
}

}  // namespace tandem::training
