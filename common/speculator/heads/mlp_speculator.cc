#include "common/speculator/heads/mlp_speculator.h"

#include <cmath>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "common/base/errors/error.h"
#include "common/base/errors/status_macros.h"
#include "common/model/config/config_fields.h"

namespace tandem::speculator {
namespace {

using nlohmann::json;

SumRnnOptions RnnOptions(const MlpSpeculatorConfig& config) {
  const int64_t state_size = config.inner_dim > 0 ? config.inner_dim : config.emb_dim;
  return {.sizes = {.hidden_size = config.emb_dim,
                    .state_size = state_size,
                    .vocab_size = config.vocab_size,
                    .n_predict = config.n_predict},
          .tie_weights = config.tie_weights,
          .scale_input = config.scale_input,
          .infix = "",
          .files_repeat = true,
          .initializer_range = [state_size](const std::vector<int64_t>&) {
            return 1 / std::sqrt(static_cast<double>(state_size));
          }};
}

absl::Status Check(const MlpSpeculatorConfig& config) {
  TANDEM_RETURN_IF_ERROR(CheckSizes(RnnOptions(config).sizes, "emb_dim"));
  if (config.tie_weights && config.n_predict == 1) {
    return InvalidField("tie_weights", "needs an n_predict above 1");
  }
  return absl::OkStatus();
}

// The keys that the reference implementation writes. Drafts are greedy: one candidate per head.
json ToJson(const MlpSpeculatorConfig& config) {
  return {{"architectures", {MlpSpeculatorKind().architectures.front()}},
          {"model_type", "mlp_speculator"},
          {"vocab_size", config.vocab_size},
          {"emb_dim", config.emb_dim},
          {"inner_dim", config.inner_dim},
          {"n_predict", config.n_predict},
          {"n_candidates", config.n_predict},
          {"top_k_tokens_per_head", std::vector<int64_t>(static_cast<size_t>(config.n_predict), 1)},
          {"tie_weights", config.tie_weights},
          {"scale_input", config.scale_input}};
}

}  // namespace

absl::StatusOr<MlpSpeculatorConfig> ReadMlpSpeculatorConfig(const ConfigFields& fields) {
  MlpSpeculatorConfig config;
  TANDEM_ASSIGN_OR_RETURN(config.vocab_size, fields.Size("vocab_size", 32000));
  TANDEM_ASSIGN_OR_RETURN(config.emb_dim, fields.Size("emb_dim", 4096));
  if (const json* inner = fields.Find("inner_dim"); inner != nullptr && *inner != 0) {
    TANDEM_ASSIGN_OR_RETURN(config.inner_dim, fields.Size("inner_dim"));
  }
  TANDEM_ASSIGN_OR_RETURN(config.n_predict, fields.Size("n_predict", 3));
  TANDEM_ASSIGN_OR_RETURN(config.tie_weights, fields.Bool("tie_weights", false));
  TANDEM_ASSIGN_OR_RETURN(config.scale_input, fields.Bool("scale_input", false));
  TANDEM_RETURN_IF_ERROR(PrependFieldPath(fields.path(), Check(config)));
  return config;
}

MlpSpeculator::MlpSpeculator(const SumRnnOptions& rnn, json config,
                             const SpeculatorOptions& options)
    : Speculator(MlpSpeculatorKind(), rnn.sizes, std::move(config), SumRnnParameters(rnn), options),
      rnn_(rnn, *this) {}

absl::StatusOr<std::unique_ptr<MlpSpeculator>> MlpSpeculator::Create(
    const MlpSpeculatorConfig& config, const SpeculatorOptions& options) {
  TANDEM_RETURN_IF_ERROR(Check(config));
  const SumRnnOptions rnn = RnnOptions(config);
  TANDEM_RETURN_IF_ERROR(CheckOptions(options, rnn.sizes));
  return std::unique_ptr<MlpSpeculator>(new MlpSpeculator(rnn, ToJson(config), options));
}

std::unique_ptr<SpeculatorPass> MlpSpeculator::Begin(const SpeculatorInput& input) const {
  return rnn_.Begin(input.hidden);
}

const SpeculatorKind& MlpSpeculatorKind() {
  static const auto* const kind = new SpeculatorKind{
      .name = "mlp",
      // The second name is that of the same model in Arctic Inference.
      .architectures = {"MLPSpeculatorPreTrainedModel", "ArcticMLPSpeculatorPreTrainedModel"},
      .file_prefix = "speculator.",
      .create = [](const ConfigFields& fields, const SpeculatorOptions& options)
          -> absl::StatusOr<std::unique_ptr<Speculator>> {
        TANDEM_ASSIGN_OR_RETURN(const MlpSpeculatorConfig config, ReadMlpSpeculatorConfig(fields));
        return MlpSpeculator::Create(config, options);
      }};
  return *kind;
}

}  // namespace tandem::speculator
