// Converts the configuration of a speculator into the plain struct. No gRPC.
#ifndef TANDEM_SERVICES_TRAINER_SERVICE_SPECULATOR_CONFIG_H_
#define TANDEM_SERVICES_TRAINER_SERVICE_SPECULATOR_CONFIG_H_

#include "common/speculator/speculator_settings.h"
#include "tandem/config/v1/server_config.pb.h"

namespace tandem::trainer {

inline speculator::SpeculatorSettings ToSpeculatorSettings(
    const config::v1::SpeculatorOptions& options) {
  return {.adapter = options.adapter(),
          .path = options.path(),
          .seed = options.seed(),
          .n_predict = options.n_predict(),
          .inner_dim = options.inner_dim(),
          .emb_dim = options.emb_dim(),
          .proj_dim = options.proj_dim(),
          .method = options.method(),
          .tie_weights = options.tie_weights(),
          .tie_lstm_embs = options.tie_lstm_embs(),
          .scale_input = options.scale_input()};
}

}  // namespace tandem::trainer

#endif  // TANDEM_SERVICES_TRAINER_SERVICE_SPECULATOR_CONFIG_H_
