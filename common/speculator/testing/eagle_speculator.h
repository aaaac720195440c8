// For tests: a third kind, after EAGLE (https://arxiv.org/abs/2401.15077). Its step is one decoder
// layer over the projection of state and embedding; the rows of a sequence attend to each other.
#ifndef TANDEM_COMMON_SPECULATOR_TESTING_EAGLE_SPECULATOR_H_
#define TANDEM_COMMON_SPECULATOR_TESTING_EAGLE_SPECULATOR_H_

#include "common/speculator/speculator_kind.h"

namespace tandem::speculator {

// The kind "eagle".
const SpeculatorKind& EagleSpeculatorKind();

}  // namespace tandem::speculator

#endif  // TANDEM_COMMON_SPECULATOR_TESTING_EAGLE_SPECULATOR_H_
