#include "common/speculator/heads/arctic_lstm_speculator.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "common/base/errors/error.h"
#include "common/base/errors/status_macros.h"
#include "common/model/config/config_fields.h"
#include "common/ops/ops.h"

namespace tandem::speculator {
namespace {

using nlohmann::json;

enum Gate : size_t { kForget, kInput, kOutput, kCell };
constexpr absl::string_view kGateNames[] = {"forget", "input", "output", "cell"};
constexpr absl::string_view kSumRnn = "sum_rnn", kSumLstm = "sum_lstm";

std::string EmbeddingName(absl::string_view gate) { return absl::StrCat(gate, "_emb.0.weight"); }

std::string ProjectionName(absl::string_view gate, int64_t index) {
  return absl::StrCat(gate, "_proj.", index, ".weight");
}

double InitializerRange(const std::vector<int64_t>& shape) {
  return 1 / std::sqrt(static_cast<double>(std::min(shape[0], shape[1])));
}

SpeculatorSizes Sizes(const ArcticLstmSpeculatorConfig& config) {
  return {.hidden_size = config.input_hidden_dim,
          .state_size = config.inner_dim,
          .vocab_size = config.vocab_size,
          .n_predict = config.n_predict};
}

absl::Status Check(const ArcticLstmSpeculatorConfig& config) {
  TANDEM_RETURN_IF_ERROR(CheckSizes(Sizes(config), "input_hidden_dim"));
  for (const auto& [key, width] :
       {std::pair("proj_dim", config.proj_dim), std::pair("emb_dim", config.emb_dim)}) {
    if (width != config.inner_dim) {
      return InvalidField(key,
                          absl::StrCat("is ", width, ", must equal inner_dim, ", config.inner_dim));
    }
  }
  if (config.method == ArcticMethod::kSumLstm && !config.tie_weights) {
    return InvalidField("tie_weights", "must be true with the method sum_lstm");
  }
  return absl::OkStatus();
}

SumRnnOptions RnnOptions(const ArcticLstmSpeculatorConfig& config) {
  return {.sizes = Sizes(config),
          .tie_weights = config.tie_weights,
          .scale_input = config.scale_input,
          .infix = ".0",
          .files_repeat = false,
          .initializer_range = InitializerRange};
}

std::vector<SpeculatorParameterSpec> LstmParameters(const ArcticLstmSpeculatorConfig& config) {
  const int64_t state = config.inner_dim;
  std::vector<SpeculatorParameterSpec> specs;
  const auto add_matrix = [&](const std::string& name, const std::vector<int64_t>& shape) {
    specs.push_back(
        {.spec = {.name = name, .shape = shape}, .initializer_range = InitializerRange(shape)});
  };
  for (const absl::string_view gate : kGateNames) {
    if (config.tie_lstm_embs && gate != kGateNames[kForget]) {
      specs.front().repeats.push_back(EmbeddingName(gate));
    } else {
      add_matrix(EmbeddingName(gate), {config.vocab_size, state});
    }
  }
  for (const absl::string_view gate : kGateNames) {
    add_matrix(ProjectionName(gate, 0), {state, config.input_hidden_dim});
    add_matrix(ProjectionName(gate, 1), {state, state});
  }
  for (const char* norm : {"cell_ln", "state_ln"}) {
    specs.push_back(
        {.spec = {.name = absl::StrCat(norm, ".0.weight"), .shape = {state}, .init = Init::kOnes}});
    specs.push_back(
        {.spec = {.name = absl::StrCat(norm, ".0.bias"), .shape = {state}, .init = Init::kZeros}});
  }
  add_matrix(HeadName(0), {config.vocab_size, state});
  for (int64_t step = 1; step < config.n_predict; ++step) {
    specs.back().repeats.push_back(HeadName(step));
  }
  return specs;
}

std::vector<SpeculatorParameterSpec> Parameters(const ArcticLstmSpeculatorConfig& config) {
  return config.method == ArcticMethod::kSumLstm ? LstmParameters(config)
                                                 : SumRnnParameters(RnnOptions(config));
}

// The keys and types of the reference implementation, which writes widths as text. Drafts are
// greedy: one candidate per head.
json ToJson(const ArcticLstmSpeculatorConfig& config) {
  return {{"architectures", {ArcticLstmSpeculatorKind().architectures.front()}},
          {"model_type", "mlp_speculator"},
          {"vocab_size", config.vocab_size},
          {"input_hidden_dim", config.input_hidden_dim},
          {"inner_dim", absl::StrCat(config.inner_dim)},
          {"proj_dim", absl::StrCat(config.proj_dim)},
          {"emb_dim", absl::StrCat(config.emb_dim)},
          {"n_predict", config.n_predict},
          {"n_candidates", config.n_predict},
          {"top_k_tokens_per_head", std::vector<int64_t>(static_cast<size_t>(config.n_predict), 1)},
          {"method", std::string(config.method == ArcticMethod::kSumLstm ? kSumLstm : kSumRnn)},
          {"tie_weights", config.tie_weights},
          {"tie_lstm_embs", config.tie_lstm_embs},
          {"scale_input", config.scale_input}};
}

// Reads a width: a number, or a number as text.
absl::StatusOr<int64_t> Width(const ConfigFields& fields, absl::string_view key) {
  const json* value = fields.Find(key);
  if (value == nullptr || !value->is_string()) return fields.Size(key);
  const std::string text = value->get<std::string>();
  if (absl::string_view(text).find('.') != absl::string_view::npos) {
    return fields.NotSupported(key, absl::StrCat("'", text, "', more than one layer,"));
  }
  int64_t width = 0;
  if (!absl::SimpleAtoi(text, &width) || width < 1) {
    return InvalidField(fields.Path(key), "must be a positive integer, or one as text");
  }
  return width;
}

}  // namespace

absl::StatusOr<ArcticLstmSpeculatorConfig> ReadArcticLstmSpeculatorConfig(
    const ConfigFields& fields) {
  ArcticLstmSpeculatorConfig config;
  TANDEM_ASSIGN_OR_RETURN(config.vocab_size, fields.Size("vocab_size"));
  TANDEM_ASSIGN_OR_RETURN(config.input_hidden_dim, fields.Size("input_hidden_dim"));
  TANDEM_ASSIGN_OR_RETURN(config.inner_dim, Width(fields, "inner_dim"));
  TANDEM_ASSIGN_OR_RETURN(config.proj_dim, Width(fields, "proj_dim"));
  TANDEM_ASSIGN_OR_RETURN(config.emb_dim, Width(fields, "emb_dim"));
  TANDEM_ASSIGN_OR_RETURN(config.n_predict, fields.Size("n_predict"));
  TANDEM_ASSIGN_OR_RETURN(config.tie_weights, fields.Bool("tie_weights", false));
  TANDEM_ASSIGN_OR_RETURN(config.tie_lstm_embs, fields.Bool("tie_lstm_embs", false));
  TANDEM_ASSIGN_OR_RETURN(config.scale_input, fields.Bool("scale_input", false));
  TANDEM_ASSIGN_OR_RETURN(const std::string method, fields.String("method", kSumRnn));
  if (method != std::string(kSumRnn) && method != std::string(kSumLstm)) {
    return InvalidField(fields.Path("method"),
                        absl::StrCat("must be sum_rnn or sum_lstm, got '", method, "'"));
  }
  config.method = method == std::string(kSumLstm) ? ArcticMethod::kSumLstm : ArcticMethod::kSumRnn;
  TANDEM_RETURN_IF_ERROR(PrependFieldPath(fields.path(), Check(config)));
  return config;
}

ArcticLstmSpeculator::ArcticLstmSpeculator(const ArcticLstmSpeculatorConfig& config,
                                           const SpeculatorOptions& options)
    : Speculator(ArcticLstmSpeculatorKind(), Sizes(config), ToJson(config), Parameters(config),
                 options),
      scale_input_(config.scale_input),
      factor_(EmbeddingFactor(config.n_predict, config.emb_dim)) {
  if (config.method == ArcticMethod::kSumLstm) {
    BindLstm(config.tie_lstm_embs);
  } else {
    rnn_.emplace(RnnOptions(config), *this);
  }
}

void ArcticLstmSpeculator::BindLstm(bool tie_lstm_embs) {
  lstm_.emplace();
  for (size_t gate = 0; gate < kGates; ++gate) {
    const absl::string_view name = kGateNames[gate];
    lstm_->embeddings[gate] = Value(EmbeddingName(tie_lstm_embs ? kGateNames[kForget] : name));
    lstm_->first_projections[gate] = Value(ProjectionName(name, 0));
    lstm_->projections[gate] = Value(ProjectionName(name, 1));
  }
  lstm_->cell_norm = {.weight = Value("cell_ln.0.weight"), .bias = Value("cell_ln.0.bias")};
  lstm_->state_norm = {.weight = Value("state_ln.0.weight"), .bias = Value("state_ln.0.bias")};
}

absl::StatusOr<std::unique_ptr<ArcticLstmSpeculator>> ArcticLstmSpeculator::Create(
    const ArcticLstmSpeculatorConfig& config, const SpeculatorOptions& options) {
  TANDEM_RETURN_IF_ERROR(Check(config));
  TANDEM_RETURN_IF_ERROR(CheckOptions(options, Sizes(config)));
  return std::unique_ptr<ArcticLstmSpeculator>(new ArcticLstmSpeculator(config, options));
}

class ArcticLstmSpeculator::LstmPass : public SpeculatorPass {
 public:
  LstmPass(const Lstm& lstm, double factor, at::Tensor state)
      : lstm_(lstm), factor_(factor), state_(std::move(state)) {}

  at::Tensor Step(const at::Tensor& tokens) override {
    const at::Tensor forget = at::sigmoid(Sum(kForget, tokens));
    const at::Tensor input = at::sigmoid(Sum(kInput, tokens));
    const at::Tensor output = at::sigmoid(Sum(kOutput, tokens));
    const at::Tensor added = at::gelu(Normalize(Sum(kCell, tokens), lstm_.cell_norm)) * input;
    if (!cell_.defined()) cell_ = at::zeros_like(added);
    cell_ = cell_ * forget + added;
    state_ = at::gelu(Normalize(cell_, lstm_.state_norm)) * output;
    is_first_ = false;
    return state_;
  }

 private:
  // The projected state and the token, of one of the gates.
  at::Tensor Sum(Gate gate, const at::Tensor& tokens) const {
    const auto& projections = is_first_ ? lstm_.first_projections : lstm_.projections;
    return ops::Linear(state_, projections[gate]) +
           factor_ * ops::Embedding(tokens, lstm_.embeddings[gate]);
  }

  const Lstm& lstm_;
  const double factor_;
  at::Tensor state_;
  at::Tensor cell_;  // undefined before step 0
  bool is_first_ = true;
};

std::unique_ptr<SpeculatorPass> ArcticLstmSpeculator::Begin(const SpeculatorInput& input) const {
  if (rnn_.has_value()) return rnn_->Begin(input.hidden);
  return std::make_unique<LstmPass>(*lstm_, factor_,
                                    FirstState(input.hidden, buffer().scalar_type(), scale_input_));
}

const SpeculatorKind& ArcticLstmSpeculatorKind() {
  static const auto* const kind =
      new SpeculatorKind{.name = "arctic_lstm",
                         // The second name is an older one of the same model.
                         .architectures = {"ArcticLSTMSpeculatorPreTrainedModel",
                                           "MLPVariantSpeculatorPreTrainedModel"},
                         .file_prefix = "",
                         .create = [](const ConfigFields& fields, const SpeculatorOptions& options)
                             -> absl::StatusOr<std::unique_ptr<Speculator>> {
                           TANDEM_ASSIGN_OR_RETURN(const ArcticLstmSpeculatorConfig config,
                                                   ReadArcticLstmSpeculatorConfig(fields));
                           return ArcticLstmSpeculator::Create(config, options);
                         }};
  return *kind;
}

}  // namespace tandem::speculator
