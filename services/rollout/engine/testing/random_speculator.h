// For tests: speculators of tiny models.
#ifndef TANDEM_SERVICES_ROLLOUT_ENGINE_TESTING_RANDOM_SPECULATOR_H_
#define TANDEM_SERVICES_ROLLOUT_ENGINE_TESTING_RANDOM_SPECULATOR_H_

#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>

#include "common/model/config/config_fields.h"
#include "common/model/model.h"
#include "common/speculator/speculator.h"
#include "common/speculator/speculator_kind.h"

namespace tandem::rollout {

// Returns a speculator with random weights for the model. Aborts on an error.
inline std::unique_ptr<speculator::Speculator> RandomSpeculator(const Model& model, int64_t heads,
                                                                const std::string& kind = "mlp",
                                                                uint64_t seed = 3) {
  constexpr int kWidth = 20;
  const int64_t hidden = model.config().hidden_size;
  nlohmann::json config = {{"vocab_size", model.config().vocab_size},
                           {"n_predict", heads},
                           {"inner_dim", kWidth},
                           {"tie_weights", true}};
  if (kind == "mlp") {
    config["emb_dim"] = hidden;
  } else {
    config.update({{"input_hidden_dim", hidden},
                   {"proj_dim", kWidth},
                   {"emb_dim", kWidth},
                   {"method", "sum_lstm"}});
  }
  return std::move(
             speculator::RandomSpeculator(*speculator::FindSpeculatorKind(kind, "kind").value(),
                                          ConfigFields(config, "config.json"), seed,
                                          {.num_token_ids = model.num_token_ids()}))
      .value();
}

}  // namespace tandem::rollout

#endif  // TANDEM_SERVICES_ROLLOUT_ENGINE_TESTING_RANDOM_SPECULATOR_H_
