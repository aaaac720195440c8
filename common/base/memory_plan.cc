#include "common/base/memory_plan.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace tandem {

int64_t MemoryPlan::total_bytes() const {
  int64_t total = 0;
  for (const Item& item : items) total += item.bytes;
  return total;
}

int64_t MemoryPlan::host_bytes() const {
  int64_t total = 0;
  for (const Item& item : items) total += item.on_host ? item.bytes : 0;
  return total;
}

absl::Status CheckFits(const MemoryPlan& plan, int64_t available_bytes) {
  if (plan.host_bytes() <= available_bytes) return absl::OkStatus();
  const auto gigabytes = [](int64_t bytes) {
    return absl::StrFormat("%.2f GB", static_cast<double>(bytes) / 1e9);
  };
  std::string items;
  for (const MemoryPlan::Item& item : plan.items) {
    if (!item.on_host) continue;
    absl::StrAppend(&items, items.empty() ? "" : ", ", item.name, " ", gigabytes(item.bytes));
    if (!item.note.empty()) absl::StrAppend(&items, ": ", item.note);
  }
  return absl::ResourceExhaustedError(
      absl::StrCat("the configuration needs ", gigabytes(plan.host_bytes()), " (", items, ") and ",
                   gigabytes(available_bytes), " are available"));
}

}  // namespace tandem
