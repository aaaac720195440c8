#include "common/base/machine/machine_resources.h"

#include <sched.h>

#include <algorithm>
#include <fstream>
#include <set>
#include <sstream>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"

namespace tandem {
namespace {

// The number after `key` in a file of "key value" lines, as in meminfo and memory.stat.
std::optional<int64_t> Field(const std::string& path, const std::string& key) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string word;
    int64_t value = 0;
    if (words >> word >> value && word == key) return value;
  }
  return std::nullopt;
}

// A file that holds one number; nullopt for "max".
std::optional<int64_t> Number(const std::string& path) {
  std::ifstream file(path);
  std::string text;
  int64_t value = 0;
  if (!(file >> text) || !absl::SimpleAtoi(text, &value)) return std::nullopt;
  return value;
}

struct Limits {
  std::optional<int64_t> memory_left;  // bytes
  std::optional<double> cpus;          // CPU seconds per second
};

template <typename T>
void Lower(std::optional<T>* limit, std::optional<T> other) {
  if (other.has_value()) *limit = std::min(limit->value_or(*other), *other);
}

// How one version of control groups names what it says of memory.
struct MemoryFiles {
  std::string limit;
  std::string used;
  std::string cache;  // a key of memory.stat
};

std::optional<int64_t> MemoryLeft(const std::string& group, const MemoryFiles& files) {
  const std::optional<int64_t> limit = Number(group + files.limit);
  const std::optional<int64_t> used = Number(group + files.used);
  if (!limit.has_value() || !used.has_value()) return std::nullopt;
  const int64_t cache = Field(group + "/memory.stat", files.cache).value_or(0);
  return std::max<int64_t>(0, *limit - std::max<int64_t>(0, *used - cache));
}

// Version 1 writes a quota of -1 for "no limit".
std::optional<double> Cpus(int64_t quota, int64_t period) {
  if (quota <= 0 || period <= 0) return std::nullopt;
  return static_cast<double>(quota) / static_cast<double>(period);
}

// cpu.max holds quota, or "max", and period.
std::optional<double> CpusOfVersion2(const std::string& group) {
  std::ifstream file(group + "/cpu.max");
  int64_t quota = 0;
  int64_t period = 0;
  if (!(file >> quota >> period)) return std::nullopt;
  return Cpus(quota, period);
}

void ReadVersion2(const std::string& group, Limits* limits) {
  Lower(&limits->memory_left,
        MemoryLeft(group, {"/memory.max", "/memory.current", "inactive_file"}));
  Lower(&limits->cpus, CpusOfVersion2(group));
}

void ReadVersion1(const std::string& group, Limits* limits) {
  Lower(&limits->memory_left, MemoryLeft(group, {"/memory.limit_in_bytes", "/memory.usage_in_bytes",
                                                 "total_inactive_file"}));
  Lower(&limits->cpus, Cpus(Number(group + "/cpu.cfs_quota_us").value_or(-1),
                            Number(group + "/cpu.cfs_period_us").value_or(-1)));
}

// The limits of the process's groups and of all their ancestors. In a container that is told the
// paths of its host, only the last ancestor exists: the folder at which the group is mounted.
Limits ControlGroupLimits(const std::string& root) {
  Limits limits;
  std::ifstream groups(root + "/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    // hierarchy:controllers:path; version 2 names no controllers.
    const std::vector<std::string> fields = absl::StrSplit(line, absl::MaxSplits(':', 2));
    if (fields.size() != 3) continue;
    const bool version2 = fields[1].empty();
    for (const absl::string_view controller : absl::StrSplit(fields[1], ',')) {
      if (!version2 && controller != "memory" && controller != "cpu") continue;
      const std::string mount =
          absl::StrCat(root, "/sys/fs/cgroup", version2 ? "" : "/", controller);
      for (std::string path(absl::StripSuffix(fields[2], "/"));; path.resize(path.rfind('/'))) {
        (version2 ? ReadVersion2 : ReadVersion1)(mount + path, &limits);
        if (path.rfind('/') == std::string::npos) break;
      }
    }
  }
  return limits;
}

int PhysicalCores(const std::string& root) {
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0) return 1;
  // Hyper-threads of one core share a list of siblings; a CPU without a list counts as a core.
  std::set<std::string> cores;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (!CPU_ISSET(cpu, &allowed)) continue;
    std::ifstream file(
        absl::StrCat(root, "/sys/devices/system/cpu/cpu", cpu, "/topology/thread_siblings_list"));
    std::string siblings;
    if (!std::getline(file, siblings)) siblings = absl::StrCat("cpu", cpu);
    cores.insert(siblings);
  }
  return static_cast<int>(cores.size());
}

}  // namespace

std::optional<int64_t> AvailableMemoryBytes(const std::string& root) {
  std::optional<int64_t> available = Field(root + "/proc/meminfo", "MemAvailable:");
  if (available.has_value()) *available *= 1024;
  Lower(&available, ControlGroupLimits(root).memory_left);
  return available;
}

std::optional<int64_t> AvailableMemoryOfRank(const RankEnvironment& environment) {
  std::optional<int64_t> available = AvailableMemoryBytes();
  if (available.has_value()) *available /= environment.local_world_size;
  return available;
}

int AvailableCores(const std::string& root) {
  int cores = PhysicalCores(root);
  const std::optional<double> quota = ControlGroupLimits(root).cpus;
  if (quota.has_value()) cores = static_cast<int>(std::min<double>(cores, *quota));
  return std::max(cores, 1);
}

}  // namespace tandem
