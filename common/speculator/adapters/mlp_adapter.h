#ifndef TANDEM_COMMON_SPECULATOR_ADAPTERS_MLP_ADAPTER_H_
#define TANDEM_COMMON_SPECULATOR_ADAPTERS_MLP_ADAPTER_H_

#include <memory>

#include "common/speculator/adapters/speculator_adapter.h"

namespace tandem::speculator {

// Makes the adapter of the kind "mlp". An inner_dim of 0 is the hidden size.
std::unique_ptr<SpeculatorAdapter> MakeMlpAdapter();

}  // namespace tandem::speculator

#endif  // TANDEM_COMMON_SPECULATOR_ADAPTERS_MLP_ADAPTER_H_
