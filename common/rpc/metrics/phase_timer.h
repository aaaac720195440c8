// Times one phase of a step into tandem_step_seconds.
#ifndef TANDEM_COMMON_RPC_METRICS_PHASE_TIMER_H_
#define TANDEM_COMMON_RPC_METRICS_PHASE_TIMER_H_

#include <chrono>
#include <optional>

#include "common/rpc/metrics/metrics.h"

namespace tandem::rpc {

// Runs from construction to Stop or destruction, whichever comes first.
class PhaseTimer {
 public:
  PhaseTimer(Metrics& metrics, const char* phase)
      : histogram_(metrics.Histogram(metric::kStepSeconds, {phase})) {}
  ~PhaseTimer() { Stop(); }
  PhaseTimer(const PhaseTimer&) = delete;
  PhaseTimer& operator=(const PhaseTimer&) = delete;

  // Seconds of the phase.
  double Stop() {
    if (!seconds_.has_value()) {
      seconds_ = std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
      histogram_.Observe(*seconds_);
    }
    return *seconds_;
  }

 private:
  prometheus::Histogram& histogram_;
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  std::optional<double> seconds_;
};

}  // namespace tandem::rpc

#endif  // TANDEM_COMMON_RPC_METRICS_PHASE_TIMER_H_
