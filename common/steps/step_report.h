// The answer to a train step, of a trainer or a critic.
#ifndef TANDEM_COMMON_STEPS_STEP_REPORT_H_
#define TANDEM_COMMON_STEPS_STEP_REPORT_H_

#include <cstdint>
#include <map>
#include <string>

#include "common/weights/weights_version.h"

namespace tandem::training {

struct StepReport {
  std::string run_id = {};
  int64_t step = 0;
  WeightsVersion weights = {};  // after the step
  bool skipped = false;
  std::string skip_reason = {};
  std::map<std::string, double> metrics = {};  // docs/reference/metrics.md

  bool operator==(const StepReport&) const = default;
};

struct StepResult {
  StepReport report;
  bool replayed = false;    // the report is from the table of done steps
  bool not_finite = false;  // skipped in this call for a loss or gradient that is not finite
  // The time that this call of a trainer waited for the critic; 0 without one.
  double critic_seconds = 0;
};

}  // namespace tandem::training

#endif  // TANDEM_COMMON_STEPS_STEP_REPORT_H_
