// The clock and the CPU time of a process that is measured.
#ifndef TANDEM_TESTS_BENCH_PROGRAMS_MOMENT_H_
#define TANDEM_TESTS_BENCH_PROGRAMS_MOMENT_H_

#include <sys/resource.h>

#include <chrono>

namespace tandem::bench {

struct Moment {
  double seconds;      // since an arbitrary start
  double cpu_seconds;  // of this process, in user and system mode

  static Moment Now() {
    rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    const auto of = [](const timeval& t) {
      return static_cast<double>(t.tv_sec) + 1e-6 * static_cast<double>(t.tv_usec);
    };
    const std::chrono::duration<double> now = std::chrono::steady_clock::now().time_since_epoch();
    return {now.count(), of(usage.ru_utime) + of(usage.ru_stime)};
  }
};

}  // namespace tandem::bench

#endif  // TANDEM_TESTS_BENCH_PROGRAMS_MOMENT_H_
