#include "common/base/machine/memory_plan.h"

#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/base/errors/status_macros.h"

namespace tandem {
namespace {

using Item = MemoryPlan::Item;
using Chosen = absl::FunctionRef<bool(const Item&)>;

int64_t SumOf(const MemoryPlan& plan, Chosen chosen) {
  int64_t total = 0;
  for (const Item& item : plan.items) total += chosen(item) ? item.bytes : 0;
  return total;
}

// Compares the chosen items with the memory `name`, "" for the host's.
absl::Status CheckMemory(const MemoryPlan& plan, Chosen chosen, const std::string& name,
                         const std::optional<int64_t>& free) {
  const int64_t needed = SumOf(plan, chosen);
  if (!free.has_value() || needed <= *free) return absl::OkStatus();
  std::string items;
  for (const Item& item : plan.items) {
    if (!chosen(item)) continue;
    absl::StrAppend(&items, items.empty() ? "" : ", ", item.name, " ", Gigabytes(item.bytes));
    if (!item.note.empty()) absl::StrAppend(&items, ": ", item.note);
  }
  return absl::ResourceExhaustedError(
      absl::StrCat("the configuration needs ", Gigabytes(needed), name.empty() ? "" : " of ", name,
                   " (", items, "), but ", Gigabytes(*free), " are available",
                   plan.remedy.empty() ? "" : "; remedies: ", plan.remedy));
}

}  // namespace

std::string Gigabytes(int64_t bytes) {
  return absl::StrFormat("%.2f GB", static_cast<double>(bytes) / 1e9);
}

int64_t MemoryPlan::total_bytes() const {
  return SumOf(*this, [](const Item&) { return true; });
}

int64_t MemoryPlan::bytes_of(const std::string& name) const {
  return SumOf(*this, [&](const Item& item) { return item.name == name; });
}

int64_t MemoryPlan::host_bytes() const {
  return SumOf(*this, [](const Item& item) { return item.on_host; });
}

int64_t MemoryPlan::device_bytes(int device) const {
  return SumOf(*this, [&](const Item& item) { return !item.on_host && item.device == device; });
}

absl::Status CheckFits(const MemoryPlan& plan, const FreeMemory& free) {
  const auto on_host = [](const Item& item) { return item.on_host; };
  TANDEM_RETURN_IF_ERROR(CheckMemory(plan, on_host, "", free.host));
  for (int device = 0; device < kDevicesOfRank; ++device) {
    const auto on_device = [&](const Item& item) { return !item.on_host && item.device == device; };
    TANDEM_RETURN_IF_ERROR(CheckMemory(plan, on_device,
                                       device == 0 ? "the GPU's memory" : "the junior's GPU",
                                       free.devices[static_cast<size_t>(device)]));
  }
  return absl::OkStatus();
}

}  // namespace tandem
