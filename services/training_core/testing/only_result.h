// For tests: the result of a batch of one request.
#ifndef TANDEM_SERVICES_TRAINING_CORE_TESTING_ONLY_RESULT_H_
#define TANDEM_SERVICES_TRAINING_CORE_TESTING_ONLY_RESULT_H_

#include "absl/status/statusor.h"
#include "services/training_core/engine.h"

namespace tandem::training {

template <typename Result>
absl::StatusOr<Result> OnlyResult(const absl::StatusOr<BatchResults<Result>>& answers) {
  if (!answers.ok()) return answers.status();
  if (!answers->error.ok()) return answers->error;
  return answers->results.at(0);
}

}  // namespace tandem::training

#endif  // TANDEM_SERVICES_TRAINING_CORE_TESTING_ONLY_RESULT_H_
