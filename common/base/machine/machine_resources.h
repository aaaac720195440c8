// Memory and cores that this process may use: those of the machine, within the limits of the
// process's control groups (cgroups version 1 and 2), which a container runtime sets.
#ifndef TANDEM_COMMON_BASE_MACHINE_MACHINE_RESOURCES_H_
#define TANDEM_COMMON_BASE_MACHINE_MACHINE_RESOURCES_H_

#include <cstdint>
#include <optional>
#include <string>

#include "common/base/machine/rank_environment.h"

namespace tandem {

// Bytes that the process may still take: the smallest of what the kernel calls available
// (MemAvailable) and what the memory limits of the control groups and their ancestors leave, page
// cache counted as free; nullopt where the system does not say. Tests give a `root` folder with a
// proc and a sys of their own.
std::optional<int64_t> AvailableMemoryBytes(const std::string& root = "");

// AvailableMemoryBytes divided among the ranks on this machine.
std::optional<int64_t> AvailableMemoryOfRank(const RankEnvironment& environment);

// Cores for a compute-bound pool of threads: physical cores in the process's affinity mask
// (hyper-threads counted once), at most the whole CPUs that the quota of the control groups grants;
// at least 1. std::thread::hardware_concurrency and OpenMP count hyper-threads and know no quota.
int AvailableCores(const std::string& root = "");

}  // namespace tandem

#endif  // TANDEM_COMMON_BASE_MACHINE_MACHINE_RESOURCES_H_
