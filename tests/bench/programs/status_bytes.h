// Memory of this process, for benchmarks.
#ifndef TANDEM_TESTS_BENCH_PROGRAMS_STATUS_BYTES_H_
#define TANDEM_TESTS_BENCH_PROGRAMS_STATUS_BYTES_H_

#include <cstdint>
#include <fstream>
#include <string>

namespace tandem {

// Returns a field of /proc/self/status in bytes.
inline int64_t StatusBytes(const std::string& field) {
  std::ifstream status("/proc/self/status");
  for (std::string name; status >> name;) {
    if (int64_t kilobytes = 0; name == field + ":" && status >> kilobytes) return kilobytes << 10;
  }
  return 0;
}

}  // namespace tandem

#endif  // TANDEM_TESTS_BENCH_PROGRAMS_STATUS_BYTES_H_
