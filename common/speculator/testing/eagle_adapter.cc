// For tests: the adapter of the kind "eagle", which registers itself.
#include <memory>

#include "common/speculator/adapters/speculator_adapter.h"
#include "common/speculator/testing/eagle_speculator.h"

namespace tandem::speculator {
namespace {

class EagleAdapter final : public SpeculatorAdapter {
 public:
  const SpeculatorKind& kind() const override { return EagleSpeculatorKind(); }

 protected:
  absl::StatusOr<nlohmann::json> Config(const SpeculatorSettings& settings,
                                        const BaseModelSizes& base) const override {
    return nlohmann::json{{"vocab_size", base.vocab_size},
                          {"hidden_size", base.hidden_size},
                          {"n_predict", settings.n_predict}};
  }
};

const bool kRegistered = RegisterSpeculatorAdapter(
    EagleSpeculatorKind(),
    []() -> std::unique_ptr<SpeculatorAdapter> { return std::make_unique<EagleAdapter>(); });

}  // namespace
}  // namespace tandem::speculator
