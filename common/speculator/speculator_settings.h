// Settings of a speculator that trains beside a language model. No torch.
#ifndef TANDEM_COMMON_SPECULATOR_SPECULATOR_SETTINGS_H_
#define TANDEM_COMMON_SPECULATOR_SPECULATOR_SETTINGS_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"

namespace tandem::speculator {

// A value of 0, an empty text and false stand for the default of the kind. With `path` all of them
// but `adapter` must be so: the directory's config.json has them.
struct SpeculatorSettings {
  std::string adapter = {};  // the name of a kind; empty: no speculator
  std::string path = {};     // directory of a speculator; empty: new weights
  uint64_t seed = 0;         // of new weights
  int64_t n_predict = 0;
  int64_t inner_dim = 0, emb_dim = 0, proj_dim = 0;
  std::string method = {};
  bool tie_weights = false, tie_lstm_embs = false, scale_input = false;
};

// The sizes of a language model that its speculator must fit.
struct BaseModelSizes {
  int64_t hidden_size = 0;
  int64_t vocab_size = 0;     // rows of the embedding
  int64_t num_token_ids = 0;  // at most vocab_size
};

// Returns the number of values of the speculator's parameters, without taking their memory. Errors
// as SpeculatorAdapter::BuildAndAttach.
absl::StatusOr<int64_t> CountSpeculatorValues(const SpeculatorSettings& settings,
                                              const BaseModelSizes& base);

}  // namespace tandem::speculator

#endif  // TANDEM_COMMON_SPECULATOR_SPECULATOR_SETTINGS_H_
