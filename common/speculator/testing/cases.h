// For tests: tiny speculators of every kind, method and choice of ties.
#ifndef TANDEM_COMMON_SPECULATOR_TESTING_CASES_H_
#define TANDEM_COMMON_SPECULATOR_TESTING_CASES_H_

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "common/kernels/weight_format.h"
#include "common/ops/products/packed_weight.h"
#include "common/speculator/speculator.h"
#include "common/speculator/speculator_kind.h"

namespace tandem::speculator {

inline constexpr int64_t kHidden = 6, kState = 5, kVocabulary = 11, kSteps = 3;

struct Case {
  std::string name;
  nlohmann::json config;
};

inline void PrintTo(const Case& tested, std::ostream* out) { *out << tested.name; }
inline std::string NameOf(const testing::TestParamInfo<Case>& info) { return info.param.name; }

inline nlohmann::json MlpJson(const nlohmann::json& changes = nlohmann::json::object()) {
  nlohmann::json config = {{"architectures", {"MLPSpeculatorPreTrainedModel"}},
                           {"vocab_size", kVocabulary},
                           {"emb_dim", kHidden},
                           {"inner_dim", kState},
                           {"n_predict", kSteps}};
  config.update(changes);
  return config;
}

inline nlohmann::json ArcticJson(const nlohmann::json& changes = nlohmann::json::object()) {
  nlohmann::json config = {{"architectures", {"ArcticLSTMSpeculatorPreTrainedModel"}},
                           {"vocab_size", kVocabulary},
                           {"input_hidden_dim", kHidden},
                           {"inner_dim", std::to_string(kState)},
                           {"proj_dim", std::to_string(kState)},
                           {"emb_dim", std::to_string(kState)},
                           {"n_predict", kSteps}};
  config.update(changes);
  return config;
}

inline std::vector<Case> Cases() {
  std::vector<Case> cases;
  for (const bool scaled : {false, true}) {
    for (const bool tied : {false, true}) {
      const std::string suffix = std::string(tied ? "Tied" : "") + (scaled ? "Scaled" : "");
      const nlohmann::json flags = {{"tie_weights", tied}, {"scale_input", scaled}};
      cases.push_back({"Mlp" + suffix, MlpJson(flags)});
      cases.push_back({"ArcticRnn" + suffix, ArcticJson(flags)});
      // The LSTM ties its steps always, its embeddings by choice.
      cases.push_back({"ArcticLstm" + suffix, ArcticJson({{"method", "sum_lstm"},
                                                          {"tie_weights", true},
                                                          {"tie_lstm_embs", tied},
                                                          {"scale_input", scaled}})});
    }
  }
  cases.push_back({"MlpOfTheModelsWidth", MlpJson({{"inner_dim", 0}, {"tie_weights", true}})});
  return cases;
}

// Aborts on an error: a test's own config is right. All parameters are random, norms too.
inline std::unique_ptr<Speculator> TinySpeculator(const nlohmann::json& config,
                                                  const SpeculatorOptions& options = {},
                                                  uint64_t seed = 1) {
  const ConfigFields fields(config, "config.json");
  auto speculator =
      std::move(RandomSpeculator(*KindOfConfig(fields).value(), fields, seed, options)).value();
  const at::NoGradGuard no_grad;
  const at::Generator generator = at::detail::createCPUGenerator(seed + 1);
  for (const SpeculatorParameter& parameter : speculator->parameters()) {
    if (parameter.spec.init == Init::kNormal) continue;
    parameter.value.add_(0.3 * at::randn(parameter.value.sizes(), generator, at::kDouble));
  }
  return speculator;
}

// Rounds the heads of a speculator that does not pack them, as packing does.
inline void RoundHeads(const Speculator& speculator) {
  const at::NoGradGuard no_grad;
  for (int64_t step = 0; step < speculator.sizes().n_predict; ++step) {
    const at::Tensor& head = speculator.head(step);
    const ops::PackedWeight packed(kernels::WeightFormat::kInt8, head.size(0), head.size(1));
    packed.SetRows(0, head);
    head.copy_(packed.Rows(at::arange(head.size(0))));
  }
}

}  // namespace tandem::speculator

#endif  // TANDEM_COMMON_SPECULATOR_TESTING_CASES_H_
