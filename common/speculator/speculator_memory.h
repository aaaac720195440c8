// The memory of a speculator, before it is loaded. No torch.
#ifndef TANDEM_COMMON_SPECULATOR_SPECULATOR_MEMORY_H_
#define TANDEM_COMMON_SPECULATOR_SPECULATOR_MEMORY_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"

namespace tandem::speculator {

// Returns the bytes that the parameters of the speculator in `directory` take. INVALID_ARGUMENT for
// "config.json" if it drafts for models of another hidden size; errors of DeclareSpeculator.
absl::StatusOr<int64_t> SpeculatorBytes(const std::string& directory, int64_t hidden_size);

}  // namespace tandem::speculator

#endif  // TANDEM_COMMON_SPECULATOR_SPECULATOR_MEMORY_H_
