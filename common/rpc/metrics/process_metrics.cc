#include "common/rpc/metrics/process_metrics.h"

#include <sys/resource.h>
#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <optional>
#include <system_error>

#include "common/base/machine/machine_resources.h"
#include "common/rpc/metrics/metric_names.h"

namespace tandem::rpc {
namespace {

double Seconds(const timeval& time) {
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) / 1e6;
}

// Entries of a directory, or nullopt if it cannot be read.
std::optional<int64_t> CountEntries(const char* directory) {
  int64_t count = 0;
  std::error_code error;
  for (std::filesystem::directory_iterator entry(directory, error), end; !error && entry != end;
       entry.increment(error)) {
    ++count;
  }
  return error ? std::nullopt : std::optional(count);
}

}  // namespace

void UpdateProcessMetrics(Metrics& metrics) {
  // Pages: of the address space, and resident (proc_pid_statm(5)).
  int64_t pages = 0;
  int64_t resident_pages = 0;
  if (std::ifstream("/proc/self/statm") >> pages >> resident_pages) {
    metrics.Gauge(metric::kResidentMemory)
        .Set(static_cast<double>(resident_pages * sysconf(_SC_PAGESIZE)));
  }
  if (const auto available = AvailableMemoryBytes()) {
    metrics.Gauge(metric::kAvailableMemory).Set(static_cast<double>(*available));
  }
  rusage usage{};
  if (getrusage(RUSAGE_SELF, &usage) == 0) {
    metrics.SetTotal(metric::kCpuSeconds, Seconds(usage.ru_utime) + Seconds(usage.ru_stime));
  }
  if (const auto files = CountEntries("/proc/self/fd")) {
    metrics.Gauge(metric::kOpenFiles).Set(static_cast<double>(*files));
  }
  if (const auto threads = CountEntries("/proc/self/task")) {
    metrics.Gauge(metric::kThreads).Set(static_cast<double>(*threads));
  }
}

}  // namespace tandem::rpc
