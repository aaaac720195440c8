// The memory of a speculator, before it is loaded. No torch.
#ifndef TANDEM_COMMON_SPECULATOR_SPECULATOR_MEMORY_H_
#define TANDEM_COMMON_SPECULATOR_SPECULATOR_MEMORY_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"

namespace tandem::speculator {

struct SpeculatorSize {
  int64_t bytes = 0;          // of all parameters; 0 without a speculator
  int64_t largest_bytes = 0;  // of the largest parameter in float32
};

// Returns the size of the speculator in `directory`, whose heads may be packed. INVALID_ARGUMENT
// for "config.json" if it drafts for models of another hidden size; errors of DeclareSpeculator.
absl::StatusOr<SpeculatorSize> MeasureSpeculator(const std::string& directory, int64_t hidden_size,
                                                 bool packs_heads);

}  // namespace tandem::speculator

#endif  // TANDEM_COMMON_SPECULATOR_SPECULATOR_MEMORY_H_
