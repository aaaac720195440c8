#include "common/speculator/testing/eagle_speculator.h"

#include <ATen/ATen.h>

#include <utility>

#include "common/base/errors/error.h"
#include "common/base/errors/status_macros.h"
#include "common/ops/ops.h"

namespace tandem::speculator {
namespace {

constexpr double kNormEpsilon = 1e-6;

std::vector<SpeculatorParameterSpec> Parameters(const SpeculatorSizes& sizes) {
  const int64_t d = sizes.hidden_size;
  std::vector<SpeculatorParameterSpec> specs;
  const auto add = [&](const std::string& name, const std::vector<int64_t>& shape) {
    const Init init = shape.size() == 1 ? Init::kOnes : Init::kNormal;
    specs.push_back(
        {.spec = {.name = name, .shape = shape, .init = init}, .initializer_range = 0.2});
  };
  add("embed.weight", {sizes.vocab_size, d});
  add("fc.weight", {d, 2 * d});
  add("attention_norm.weight", {d});
  for (const char* name : {"q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight"}) {
    add(name, {d, d});
  }
  add("mlp_norm.weight", {d});
  add("gate_up_proj.weight", {4 * d, d});
  add("down_proj.weight", {d, 2 * d});
  add(HeadName(0), {sizes.vocab_size, d});
  for (int64_t step = 1; step < sizes.n_predict; ++step) {
    specs.back().repeats.push_back(HeadName(step));
  }
  return specs;
}

class EagleSpeculator final : public Speculator {
 public:
  EagleSpeculator(const SpeculatorSizes& sizes, int64_t heads, nlohmann::json config,
                  const SpeculatorOptions& options)
      : Speculator(EagleSpeculatorKind(), sizes, std::move(config), Parameters(sizes), options),
        heads_(heads) {}

  std::unique_ptr<SpeculatorPass> Begin(const SpeculatorInput& input) const override {
    return std::make_unique<Pass>(*this, input);
  }

 private:
  class Pass final : public SpeculatorPass {
   public:
    Pass(const EagleSpeculator& model, const SpeculatorInput& input)
        : model_(model), state_(input.hidden.to(at::kFloat)), offsets_(input.offsets) {}

    at::Tensor Step(const at::Tensor& tokens) override {
      const auto linear = [&](const at::Tensor& x, const char* name) {
        return ops::Linear(x, model_.Value(name));
      };
      const at::Tensor embedded = ops::Embedding(tokens, model_.Value("embed.weight"));
      at::Tensor x = linear(at::cat({embedded, state_}, 1), "fc.weight");
      const at::Tensor attended =
          ops::RmsNorm(x, model_.Value("attention_norm.weight"), kNormEpsilon);
      const auto heads = [&](const char* name) {
        return linear(attended, name).view({x.size(0), model_.heads_, -1});
      };
      x = x + linear(ops::CausalAttention(heads("q_proj.weight"), heads("k_proj.weight"),
                                          heads("v_proj.weight"), offsets_),
                     "o_proj.weight");
      const at::Tensor normed = ops::RmsNorm(x, model_.Value("mlp_norm.weight"), kNormEpsilon);
      state_ = x + linear(ops::SwiGlu(linear(normed, "gate_up_proj.weight")), "down_proj.weight");
      return state_;
    }

   private:
    const EagleSpeculator& model_;
    at::Tensor state_;
    const std::vector<int64_t> offsets_;
  };

  const int64_t heads_;
};

absl::StatusOr<std::unique_ptr<Speculator>> Create(const ConfigFields& fields,
                                                   const SpeculatorOptions& options) {
  SpeculatorSizes sizes;
  TANDEM_ASSIGN_OR_RETURN(sizes.vocab_size, fields.Size("vocab_size"));
  TANDEM_ASSIGN_OR_RETURN(sizes.hidden_size, fields.Size("hidden_size"));
  TANDEM_ASSIGN_OR_RETURN(sizes.n_predict, fields.Size("n_predict"));
  TANDEM_ASSIGN_OR_RETURN(const int64_t heads, fields.Size("num_attention_heads", 2));
  sizes.state_size = sizes.hidden_size;
  TANDEM_RETURN_IF_ERROR(PrependFieldPath(fields.path(), CheckSizes(sizes, "hidden_size")));
  TANDEM_RETURN_IF_ERROR(CheckOptions(options, sizes));
  nlohmann::json config = {{"architectures", {EagleSpeculatorKind().architectures.front()}},
                           {"vocab_size", sizes.vocab_size},
                           {"hidden_size", sizes.hidden_size},
                           {"n_predict", sizes.n_predict},
                           {"num_attention_heads", heads}};
  return std::make_unique<EagleSpeculator>(sizes, heads, std::move(config), options);
}

}  // namespace

const SpeculatorKind& EagleSpeculatorKind() {
  static const auto* const kind = new SpeculatorKind{.name = "eagle",
                                                     .architectures = {"EagleTestSpeculator"},
                                                     .file_prefix = "",
                                                     .create = Create};
  return *kind;
}

}  // namespace tandem::speculator
