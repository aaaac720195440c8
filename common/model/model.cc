#include "common/model/model.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/grad_mode.h>

#include <map>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/base/error.h"
#include "common/base/status_macros.h"
#include "common/model/backbone.h"
#include "common/model/family_registry.h"
#include "common/model/parameter_store.h"
#include "common/model/value_head_tensors.h"
#include "common/ops/ops.h"

namespace tandem {

Model::~Model() = default;

absl::StatusOr<std::unique_ptr<Model>> Model::Build(const ModelConfig& config, HeadKind head,
                                                    bool tied, bool value_head_bias,
                                                    bool requires_grad) {
  std::unique_ptr<Model> model(new Model);
  model->config_ = config;
  model->head_ = head;
  model->tied_ = tied;
  model->store_ = std::make_unique<ParameterStore>(requires_grad);
  TANDEM_ASSIGN_OR_RETURN(model->family_, FindFamily(config.model_type));
  TANDEM_ASSIGN_OR_RETURN(model->backbone_, model->family_->build(config, *model->store_));
  using Init = ParameterStore::Init;
  if (head == HeadKind::kLm) {
    model->lm_head_ = tied
                          ? model->backbone_->embedding()
                          : model->store_->Add(kLmHeadName, {config.vocab_size, config.hidden_size},
                                               Init::kNormal);
  } else if (head == HeadKind::kValue) {
    model->value_head_ =
        model->store_->Add(kValueHeadWeight, {1, config.hidden_size}, Init::kNormal);
    if (value_head_bias) {
      model->value_head_bias_ = model->store_->Add(kValueHeadBias, {1}, Init::kZeros);
    }
  }
  return model;
}

absl::StatusOr<std::unique_ptr<Model>> Model::Random(const ModelConfig& config, uint64_t seed,
                                                     const LoadOptions& options) {
  const bool tied =
      options.head == HeadKind::kLm && config.tie_word_embeddings && !options.untie_embeddings;
  TANDEM_ASSIGN_OR_RETURN(auto model, Build(config, options.head, tied, /*value_head_bias=*/false,
                                            options.requires_grad));
  model->Initialize(seed);
  if (options.head == HeadKind::kValue) model->value_head_source_ = ValueHeadSource::kRandom;
  return model;
}

void Model::Initialize(uint64_t seed) {
  at::NoGradGuard no_grad;
  const at::Generator generator = at::detail::createCPUGenerator(seed);
  for (size_t i = 0; i < store_->parameters().size(); ++i) {
    const at::Tensor& parameter = store_->parameters()[i].second;
    switch (store_->inits()[i]) {
      case ParameterStore::Init::kNormal:
        parameter.normal_(0.0, config_.initializer_range, generator);
        break;
      case ParameterStore::Init::kOnes:
        parameter.fill_(1.0);
        break;
      case ParameterStore::Init::kZeros:
        parameter.zero_();
        break;
    }
  }
}

at::Tensor Model::HiddenStates(const RaggedBatch& batch, AttentionContext& context) const {
  return backbone_->HiddenStates(batch, context, /*rows=*/{});
}

at::Tensor Model::ForwardLogits(const at::Tensor& hidden) const {
  TORCH_CHECK(head_ == HeadKind::kLm, "the model has no language-model head");
  return ops::Linear(hidden, lm_head_);
}

at::Tensor Model::Values(const at::Tensor& hidden) const {
  TORCH_CHECK(head_ == HeadKind::kValue, "the model has no value head");
  return ops::Linear(hidden, value_head_, value_head_bias_).squeeze(1);
}

namespace {

absl::Status CheckInput(const KvCache& cache, const DecodeInput& input, int64_t vocab_size) {
  const int64_t count = static_cast<int64_t>(input.tokens.size());
  if (input.slot < 0 || input.slot >= cache.num_slots() || !cache.in_use(input.slot)) {
    return InvalidField("slot", absl::StrCat(input.slot, " is not allocated"));
  }
  if (count == 0) return InvalidField("tokens", "must not be empty");
  if (input.num_output_rows < 0 || input.num_output_rows > count) {
    return InvalidField("num_output_rows",
                        absl::StrCat("must be in [0, ", count, "], got ", input.num_output_rows));
  }
  if (cache.cursor(input.slot) + count > cache.max_model_len()) {
    return FieldError(absl::StatusCode::kOutOfRange, "tokens",
                      absl::StrCat(cache.cursor(input.slot), " tokens and ", count,
                                   " more exceed max_model_len ", cache.max_model_len()));
  }
  for (int64_t i = 0; i < count; ++i) {
    if (input.tokens[i] < 0 || input.tokens[i] >= vocab_size) {
      return InvalidField(
          absl::StrCat("tokens[", i, "]"),
          absl::StrCat(input.tokens[i], " is outside the vocabulary of ", vocab_size));
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<at::Tensor> Model::Decode(KvCache& cache,
                                         absl::Span<const DecodeInput> inputs) const {
  at::NoGradGuard no_grad;
  RaggedBatch batch;
  batch.offsets = {0};
  std::vector<int64_t> slots, tokens, positions, rows;
  std::set<int64_t> seen;
  for (size_t i = 0; i < inputs.size(); ++i) {
    const DecodeInput& input = inputs[i];
    absl::Status status = CheckInput(cache, input, config_.vocab_size);
    if (status.ok() && !seen.insert(input.slot).second) {
      status = InvalidField("slot", absl::StrCat(input.slot, " appears twice"));
    }
    if (!status.ok()) return PrependFieldPath(absl::StrCat("inputs[", i, "]"), status);
    const int64_t count = static_cast<int64_t>(input.tokens.size());
    for (int64_t t = 0; t < count; ++t) {
      if (t >= count - input.num_output_rows) rows.push_back(batch.offsets.back() + t);
      tokens.push_back(input.tokens[t]);
      positions.push_back(cache.cursor(input.slot) + t);
    }
    slots.push_back(input.slot);
    batch.offsets.push_back(batch.offsets.back() + count);
  }
  if (inputs.empty()) return at::empty({0, config_.hidden_size}, at::kFloat);
  batch.tokens = at::tensor(tokens, at::kLong);
  batch.positions = at::tensor(positions, at::kLong);
  at::Tensor wanted;
  if (rows.size() != tokens.size()) wanted = at::tensor(rows, at::kLong);

  CachedContext context(cache, slots);
  const at::Tensor hidden = backbone_->HiddenStates(batch, context, wanted);
  for (const DecodeInput& input : inputs) {
    cache.Advance(input.slot, static_cast<int64_t>(input.tokens.size()));
  }
  return hidden;
}

NamedTensors Model::Parameters() const { return store_->parameters(); }

at::Tensor Model::Parameter(absl::string_view name) const {
  for (const auto& [parameter_name, tensor] : store_->parameters()) {
    if (name == parameter_name) return tensor;
  }
  return {};
}

int64_t Model::num_parameters() const {
  int64_t count = 0;
  for (const auto& [name, tensor] : store_->parameters()) count += tensor.numel();
  return count;
}

ModelSummary Model::Summary(int64_t max_model_len) const {
  return {.path = source_directory_,
          .model_type = config_.model_type,
          .vocab_size = config_.vocab_size,
          .num_parameters = num_parameters(),
          .max_model_len = max_model_len,
          .eos_token_ids = config_.eos_token_ids};
}

absl::Status Model::LoadParameters(const NamedTensors& tensors) {
  const auto fail = [](const std::string& name, absl::string_view what) {
    return absl::InvalidArgumentError(absl::StrCat("tensor '", name, "': ", what));
  };
  std::map<std::string, at::Tensor> missing(store_->parameters().begin(),
                                            store_->parameters().end());
  std::vector<std::pair<at::Tensor, at::Tensor>> copies;
  at::Tensor tied_head;
  for (const auto& [name, tensor] : tensors) {
    if (tied_ && name == kLmHeadName) {
      tied_head = tensor;
      continue;
    }
    const auto found = missing.find(name);
    if (found == missing.end()) return fail(name, "appears twice or is not a parameter");
    const at::Tensor& parameter = found->second;
    if (!tensor.defined() || tensor.sizes() != parameter.sizes()) {
      return fail(name, absl::StrCat("shape [", absl::StrJoin(tensor.sizes(), ", "),
                                     "], expected [", absl::StrJoin(parameter.sizes(), ", "), "]"));
    }
    if (!tensor.is_floating_point()) return fail(name, "is not floating-point");
    copies.emplace_back(parameter, tensor);
    missing.erase(found);
  }
  if (!missing.empty()) return fail(missing.begin()->first, "is missing");
  if (tied_head.defined()) {
    for (const auto& [parameter, tensor] : copies) {
      if (parameter.is_same(lm_head_) &&
          !at::equal(tensor.to(at::kFloat), tied_head.to(at::kFloat))) {
        return fail(kLmHeadName, "differs from the embedding, which is this model's output layer");
      }
    }
  }
  at::NoGradGuard no_grad;
  for (const auto& [parameter, tensor] : copies) parameter.copy_(tensor);
  return absl::OkStatus();
}

}  // namespace tandem
