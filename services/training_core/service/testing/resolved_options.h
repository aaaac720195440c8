// For tests: the options that an engine gets from a configuration, with its defaults. No protobuf,
// whose headers do not go with torch's.
#ifndef TANDEM_SERVICES_TRAINING_CORE_SERVICE_TESTING_RESOLVED_OPTIONS_H_
#define TANDEM_SERVICES_TRAINING_CORE_SERVICE_TESTING_RESOLVED_OPTIONS_H_

#include <string>
#include <vector>

#include "services/training_core/engine.h"

namespace tandem::training {

// Sets `options` to those of a trainer with `settings` ("strategy.name=zero") beside its model, as
// a single process. Settings that are refused end the process.
void SetResolvedOptions(const std::string& model, const std::vector<std::string>& settings,
                        TrainingOptions* options);

}  // namespace tandem::training

#endif  // TANDEM_SERVICES_TRAINING_CORE_SERVICE_TESTING_RESOLVED_OPTIONS_H_
