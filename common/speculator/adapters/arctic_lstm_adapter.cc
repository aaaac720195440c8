#include "common/speculator/adapters/arctic_lstm_adapter.h"

#include <cstdint>

#include "common/speculator/heads/arctic_lstm_speculator.h"

namespace tandem::speculator {
namespace {

constexpr int64_t kDefaultSteps = 3;

int64_t Or(int64_t value, int64_t fallback) { return value != 0 ? value : fallback; }

class ArcticLstmAdapter final : public SpeculatorAdapter {
 public:
  const SpeculatorKind& kind() const override { return ArcticLstmSpeculatorKind(); }

 protected:
  absl::StatusOr<nlohmann::json> Config(const SpeculatorSettings& settings,
                                        const BaseModelSizes& base) const override {
    const int64_t inner_dim = Or(settings.inner_dim, base.hidden_size);
    nlohmann::json config = {{"vocab_size", base.vocab_size},
                             {"input_hidden_dim", base.hidden_size},
                             {"inner_dim", inner_dim},
                             {"emb_dim", Or(settings.emb_dim, inner_dim)},
                             {"proj_dim", Or(settings.proj_dim, inner_dim)},
                             {"n_predict", Or(settings.n_predict, kDefaultSteps)},
                             {"tie_weights", settings.tie_weights},
                             {"tie_lstm_embs", settings.tie_lstm_embs},
                             {"scale_input", settings.scale_input}};
    if (!settings.method.empty()) config["method"] = settings.method;
    return config;
  }
};

}  // namespace

std::unique_ptr<SpeculatorAdapter> MakeArcticLstmAdapter() {
  return std::make_unique<ArcticLstmAdapter>();
}

}  // namespace tandem::speculator
