// The memory that a configuration needs, item by item.
#ifndef TANDEM_COMMON_BASE_MEMORY_PLAN_H_
#define TANDEM_COMMON_BASE_MEMORY_PLAN_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"

namespace tandem {

// Plans are computed from config.json before anything is allocated. They leave out the program
// itself (some 300 MB), and mapped weight files, which the system may drop.
struct MemoryPlan {
  struct Item {
    std::string name;  // "senior_kv_cache"
    int64_t bytes = 0;
    bool on_host = true;    // false: in the memory of the compute device
    std::string note = {};  // what the bytes follow from, for the reader; may be empty
  };
  std::vector<Item> items;

  int64_t total_bytes() const;
  int64_t host_bytes() const;
};

// RESOURCE_EXHAUSTED with the numbers when the plan needs more than `available_bytes` of the host.
absl::Status CheckFits(const MemoryPlan& plan, int64_t available_bytes);

}  // namespace tandem

#endif  // TANDEM_COMMON_BASE_MEMORY_PLAN_H_
