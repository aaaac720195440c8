#ifndef TANDEM_COMMON_SPECULATOR_ADAPTERS_ARCTIC_LSTM_ADAPTER_H_
#define TANDEM_COMMON_SPECULATOR_ADAPTERS_ARCTIC_LSTM_ADAPTER_H_

#include <memory>

#include "common/speculator/adapters/speculator_adapter.h"

namespace tandem::speculator {

// Makes the adapter of the kind "arctic_lstm". An inner_dim of 0 is the hidden size, an emb_dim or
// proj_dim of 0 is the inner_dim, an n_predict of 0 is 3.
std::unique_ptr<SpeculatorAdapter> MakeArcticLstmAdapter();

}  // namespace tandem::speculator

#endif  // TANDEM_COMMON_SPECULATOR_ADAPTERS_ARCTIC_LSTM_ADAPTER_H_
