#include "common/speculator/adapters/mlp_adapter.h"

#include "absl/strings/str_cat.h"
#include "common/base/errors/error.h"
#include "common/base/errors/status_macros.h"
#include "common/speculator/heads/mlp_speculator.h"

namespace tandem::speculator {
namespace {

class MlpAdapter final : public SpeculatorAdapter {
 public:
  const SpeculatorKind& kind() const override { return MlpSpeculatorKind(); }

 protected:
  absl::StatusOr<nlohmann::json> Config(const SpeculatorSettings& settings,
                                        const BaseModelSizes& base) const override {
    for (const auto& [name, is_set] : {std::pair{"proj_dim", settings.proj_dim != 0},
                                       std::pair{"method", !settings.method.empty()},
                                       std::pair{"tie_lstm_embs", settings.tie_lstm_embs}}) {
      TANDEM_RETURN_IF_ERROR(RefuseSetting(name, is_set, kind()));
    }
    // The published files call the hidden size emb_dim.
    if (settings.emb_dim != 0 && settings.emb_dim != base.hidden_size) {
      return InvalidField("emb_dim", absl::StrCat("is ", settings.emb_dim,
                                                  ", must be 0 or the hidden size of the model, ",
                                                  base.hidden_size));
    }
    nlohmann::json config = {{"vocab_size", base.vocab_size},
                             {"emb_dim", base.hidden_size},
                             {"inner_dim", settings.inner_dim},
                             {"tie_weights", settings.tie_weights},
                             {"scale_input", settings.scale_input}};
    if (settings.n_predict != 0) config["n_predict"] = settings.n_predict;
    return config;
  }
};

}  // namespace

std::unique_ptr<SpeculatorAdapter> MakeMlpAdapter() { return std::make_unique<MlpAdapter>(); }

}  // namespace tandem::speculator
