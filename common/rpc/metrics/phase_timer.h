// Times one phase of a step into tandem_step_seconds.
#ifndef TANDEM_COMMON_RPC_METRICS_PHASE_TIMER_H_
#define TANDEM_COMMON_RPC_METRICS_PHASE_TIMER_H_

#include <optional>

#include "absl/time/time.h"
#include "common/base/steady_time.h"
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
      seconds_ = absl::ToDoubleSeconds(SteadyTime::Now() - start_);
      histogram_.Observe(*seconds_);
    }
    return *seconds_;
  }

 private:
  prometheus::Histogram& histogram_;
  const SteadyTime start_ = SteadyTime::Now();
  std::optional<double> seconds_;
};

}  // namespace tandem::rpc

#endif  // TANDEM_COMMON_RPC_METRICS_PHASE_TIMER_H_
