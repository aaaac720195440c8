#include "common/steps/mini_batches.h"

#include <algorithm>

#include "common/base/errors/field_check.h"
#include "common/base/errors/status_macros.h"

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

std::vector<MiniBatch> SplitIntoMiniBatches(size_t num_samples, const UpdateOptions& options,
                                            absl::Span<const size_t> groups) {
  const size_t count = std::min(num_samples, static_cast<size_t>(options.num_mini_batches));
  std::vector<MiniBatch> batches;
  size_t begin = 0, group = 0;  // of the next mini-batch
  for (size_t i = 0; i < count; ++i) {
    size_t end = (i + 1) * num_samples / count;
    if (groups.size() >= count && i + 1 < count) {
      // The group whose beginning is nearest; the mini-batches that follow have a group each.
      const auto first = groups.begin() + static_cast<std::ptrdiff_t>(group + 1);
      const auto last = groups.end() - static_cast<std::ptrdiff_t>(count - i - 2);
      auto next = std::lower_bound(first, last, end);
      if (next == last || (next != first && end - *(next - 1) <= *next - end)) --next;
      group = static_cast<size_t>(next - groups.begin());
      end = *next;
    }
    batches.push_back({.begin = begin, .end = end});
    begin = end;
  }
  return batches;
}

}  // namespace tandem::training
