// What a train step answers, of trainer and critic alike.
#ifndef TANDEM_COMMON_TRAINING_STEP_REPORT_H_
#define TANDEM_COMMON_TRAINING_STEP_REPORT_H_

#include <cstdint>
#include <map>
#include <string>

#include "common/base/weights_version.h"

namespace tandem::training {

struct StepReport {
  std::string run_id = {};
  int64_t step = 0;
  WeightsVersion weights = {};  // after the step
  bool skipped = false;
  std::string skip_reason = {};
  std::map<std::string, double> metrics = {};  // docs/metrics.md

  bool operator==(const StepReport&) const = default;
};

struct StepResult {
  StepReport report;
  bool replayed = false;    // the report comes from the table of done steps
  bool not_finite = false;  // skipped, just now, because of a loss or gradient that is not
};

}  // namespace tandem::training

#endif  // TANDEM_COMMON_TRAINING_STEP_REPORT_H_
