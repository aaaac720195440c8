#include "common/speculator/heads/sum_rnn.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "common/ops/ops.h"

namespace tandem::speculator {
namespace {

// Names of the parameters of a step, and of the step whose parameters it uses.
class Names {
 public:
  explicit Names(const SumRnnOptions& options) : options_(options) {}

  std::string Of(absl::string_view role, int64_t step, absl::string_view suffix) const {
    return absl::StrCat(role, ".", step, options_.infix, ".", suffix);
  }
  // The step that owns the embedding, norm and head of a step.
  int64_t Owner(int64_t step) const { return options_.tie_weights ? 0 : step; }
  // The step that owns the projection: that of step 0 has another input.
  int64_t ProjectionOwner(int64_t step) const {
    return options_.tie_weights ? std::min<int64_t>(step, 1) : step;
  }

 private:
  const SumRnnOptions& options_;
};

}  // namespace

std::vector<SpeculatorParameterSpec> SumRnnParameters(const SumRnnOptions& options) {
  const auto [hidden, state, vocabulary, n_predict] = options.sizes;
  const Names names(options);
  std::vector<SpeculatorParameterSpec> specs;
  // Adds a parameter that belongs to `step`, or its name to the parameter of `owner`.
  const auto add = [&](const std::string& name, const std::string& owner,
                       const std::vector<int64_t>& shape, Init init, bool repeats) {
    if (name == owner) {
      const double range = init == Init::kNormal ? options.initializer_range(shape) : 0;
      specs.push_back(
          {.spec = {.name = name, .shape = shape, .init = init}, .initializer_range = range});
    } else if (repeats) {
      std::find_if(specs.begin(), specs.end(), [&](const auto& spec) {
        return spec.spec.name == owner;
      })->repeats.push_back(name);
    }
  };
  for (int64_t step = 0; step < n_predict; ++step) {
    const int64_t owner = names.Owner(step), projection = names.ProjectionOwner(step);
    const auto role = [&](absl::string_view name, int64_t from, absl::string_view suffix,
                          const std::vector<int64_t>& shape, Init init) {
      add(names.Of(name, step, suffix), names.Of(name, from, suffix), shape, init,
          options.files_repeat);
    };
    role("emb", owner, "weight", {vocabulary, state}, Init::kNormal);
    role("proj", projection, "weight", {state, step == 0 ? hidden : state}, Init::kNormal);
    role("ln", owner, "weight", {state}, Init::kOnes);
    role("ln", owner, "bias", {state}, Init::kZeros);
    add(HeadName(step), HeadName(owner), {vocabulary, state}, Init::kNormal, /*repeats=*/true);
  }
  return specs;
}

SumRnn::SumRnn(const SumRnnOptions& options, const Speculator& speculator)
    : scale_input_(options.scale_input),
      factor_(EmbeddingFactor(options.sizes.n_predict, options.sizes.state_size)) {
  const Names names(options);
  for (int64_t step = 0; step < options.sizes.n_predict; ++step) {
    const int64_t owner = names.Owner(step), projection = names.ProjectionOwner(step);
    steps_.push_back({.embedding = speculator.Value(names.Of("emb", owner, "weight")),
                      .projection = speculator.Value(names.Of("proj", projection, "weight")),
                      .norm = {.weight = speculator.Value(names.Of("ln", owner, "weight")),
                               .bias = speculator.Value(names.Of("ln", owner, "bias"))}});
  }
}

class SumRnn::Pass : public SpeculatorPass {
 public:
  Pass(const SumRnn& rnn, at::Tensor state) : rnn_(rnn), state_(std::move(state)) {}

  at::Tensor Step(const at::Tensor& tokens) override {
    const SumRnn::Step& step = rnn_.steps_.at(next_++);
    const at::Tensor sum = ops::Linear(state_, step.projection) +
                           rnn_.factor_ * ops::Embedding(tokens, step.embedding);
    state_ = at::gelu(Normalize(sum, step.norm));
    return state_;
  }

 private:
  const SumRnn& rnn_;
  at::Tensor state_;
  size_t next_ = 0;
};

std::unique_ptr<SpeculatorPass> SumRnn::Begin(const at::Tensor& hidden) const {
  const at::ScalarType dtype = steps_.front().projection.scalar_type();
  return std::make_unique<Pass>(*this, FirstState(hidden, dtype, scale_input_));
}

}  // namespace tandem::speculator
