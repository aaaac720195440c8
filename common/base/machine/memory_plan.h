// The memory that a configuration needs, item by item.
#ifndef TANDEM_COMMON_BASE_MACHINE_MEMORY_PLAN_H_
#define TANDEM_COMMON_BASE_MACHINE_MEMORY_PLAN_H_

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"

namespace tandem {

// The devices of a rank: its own GPU and another one, such as a junior's.
inline constexpr int kDevicesOfRank = 2;

// Bytes that a rank may take; nullopt: not known.
struct FreeMemory {
  std::optional<int64_t> host = std::nullopt;
  std::array<std::optional<int64_t>, kDevicesOfRank> devices = {};
  // The size of each device's memory, whether free or not.
  std::array<std::optional<int64_t>, kDevicesOfRank> device_sizes = {};
};

// Returns bytes as text for a reader: "8.00 GB".
std::string Gigabytes(int64_t bytes);

// Plans are computed from config.json before anything is allocated. They leave out the program
// itself (some 300 MB), and mapped weight files, which the system may drop.
struct MemoryPlan {
  struct Item {
    std::string name;  // "senior_kv_cache"
    int64_t bytes = 0;
    bool on_host = true;    // false: in the memory of the compute device
    std::string note = {};  // what the bytes follow from, for the reader; may be empty
    int device = 0;         // where not on the host: which of the rank's devices
  };
  std::vector<Item> items;
  std::string remedy = {};  // the settings that need less, for an error; may be empty

  int64_t total_bytes() const;
  int64_t bytes_of(const std::string& name) const;  // of the items of that name
  int64_t host_bytes() const;
  int64_t device_bytes(int device) const;
};

// RESOURCE_EXHAUSTED with the numbers when the plan needs more than is free.
absl::Status CheckFits(const MemoryPlan& plan, const FreeMemory& free);

}  // namespace tandem

#endif  // TANDEM_COMMON_BASE_MACHINE_MEMORY_PLAN_H_
