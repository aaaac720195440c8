#include "common/speculator/speculator.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "common/base/errors/error.h"
#include "common/base/errors/field_check.h"
#include "common/base/errors/status_macros.h"
#include "common/ops/ops.h"
#include "common/speculator/heads/argmax_rows.h"
#include "common/tensor/aten/tensor_memory.h"

namespace tandem::speculator {
namespace {

// Bounds of what a config.json may ask for. The number of parameters then fits 64 bits.
constexpr int64_t kMaxSize = int64_t{1} << 24, kMaxSteps = 64;

constexpr kernels::WeightFormat kHeadFormat = kernels::WeightFormat::kInt8;

bool IsHead(const SpeculatorParameterSpec& parameter) {
  return absl::StartsWith(parameter.spec.name, "head.");
}

int64_t Aligned(int64_t numel) { return (numel + 31) / 32 * 32; }

}  // namespace

int64_t SpeculatorParameter::bytes() const {
  if (value.defined()) return static_cast<int64_t>(value.nbytes());
  return kernels::PackedBytes(kHeadFormat, spec.shape[0], spec.shape[1]);
}

void SpeculatorParameter::Assign(const at::Tensor& values) const {
  const at::NoGradGuard no_grad;
  if (packed == nullptr) {
    value.copy_(values);
  } else {
    packed->SetRows(0, values, ops::PackThreads::kOne);  // an update packs beside serving
  }
}

std::string HeadName(int64_t step) { return absl::StrCat("head.", step, ".weight"); }

absl::Status CheckSizes(const SpeculatorSizes& sizes, absl::string_view hidden_field) {
  TANDEM_RETURN_IF_ERROR(CheckInRange("n_predict", sizes.n_predict, 1, kMaxSteps));
  TANDEM_RETURN_IF_ERROR(CheckInRange("vocab_size", sizes.vocab_size, 1, kMaxSize));
  TANDEM_RETURN_IF_ERROR(CheckInRange(hidden_field, sizes.hidden_size, 1, kMaxSize));
  return CheckInRange("inner_dim", sizes.state_size, 1, kMaxSize);
}

absl::Status CheckOptions(const SpeculatorOptions& options, const SpeculatorSizes& sizes) {
  if (options.dtype != at::kFloat && options.dtype != at::kDouble) {
    return FieldError(absl::StatusCode::kUnimplemented, "dtype",
                      "only float32 speculators are supported yet");
  }
  if (options.packs_heads && (options.requires_grad || !ops::PackedWeight::IsSupported())) {
    return InvalidField("packs_heads", "needs the CPU's own kernels, and heads that do not train");
  }
  return CheckInRange("num_token_ids", options.num_token_ids, 0, sizes.vocab_size);
}

Speculator::Speculator(const SpeculatorKind& kind, const SpeculatorSizes& sizes,
                       nlohmann::json config, const std::vector<SpeculatorParameterSpec>& specs,
                       const SpeculatorOptions& options)
    : kind_(kind),
      sizes_(sizes),
      num_token_ids_(options.num_token_ids > 0 ? options.num_token_ids : sizes.vocab_size),
      requires_grad_(options.requires_grad),
      packs_heads_(options.packs_heads),
      config_(std::move(config)),
      settings_(config_.dump()) {
  const at::NoGradGuard no_grad;
  const auto packs = [&](const auto& parameter) { return packs_heads_ && IsHead(parameter); };
  int64_t values = 0;
  for (const SpeculatorParameterSpec& spec : specs) {
    if (!packs(spec)) values += Aligned(spec.spec.numel());
  }
  buffer_ = EmptyWithoutMemory(values, at::device(options.device).dtype(options.dtype));
  int64_t begin = 0;
  for (const SpeculatorParameterSpec& spec : specs) {
    if (packs(spec)) {
      parameters_.push_back({spec, {}});
      continue;
    }
    const at::Tensor value = buffer_.narrow(0, begin, spec.spec.numel()).view(spec.spec.shape);
    begin += Aligned(spec.spec.numel());
    parameters_.push_back({spec, value.detach().requires_grad_(options.requires_grad)});
  }
  for (int64_t step = 0; step < sizes.n_predict; ++step) {
    const std::string name = HeadName(step);
    for (size_t i = 0; i < parameters_.size(); ++i) {
      const auto& repeats = parameters_[i].repeats;
      if (parameters_[i].spec.name == name ||
          std::find(repeats.begin(), repeats.end(), name) != repeats.end()) {
        heads_.push_back(i);
      }
    }
  }
  TORCH_INTERNAL_ASSERT(heads_.size() == static_cast<size_t>(sizes.n_predict));
}

void Speculator::KeepOtherKeys(const nlohmann::json& config) {
  nlohmann::json merged = config;
  merged.update(config_);
  config_ = std::move(merged);
}

void Speculator::AllocateParameters() {
  AllocateMemory(buffer_);
  for (SpeculatorParameter& parameter : parameters_) {
    if (parameter.value.defined()) continue;
    const std::vector<int64_t>& shape = parameter.spec.shape;
    parameter.packed = std::make_shared<ops::PackedWeight>(kHeadFormat, shape[0], shape[1]);
  }
}

const at::Tensor& Speculator::Value(absl::string_view name) const {
  const auto found = std::find_if(
      parameters_.begin(), parameters_.end(),
      [&](const SpeculatorParameter& parameter) { return parameter.spec.name == name; });
  TORCH_CHECK(found != parameters_.end(), "no parameter '", std::string(name), "'");
  return found->value;
}

std::vector<at::Tensor> Speculator::States(const SpeculatorInput& input,
                                           absl::Span<const at::Tensor> tokens) const {
  const std::unique_ptr<SpeculatorPass> pass = Begin(input);
  std::vector<at::Tensor> states;
  for (const at::Tensor& step : tokens) states.push_back(pass->Step(step));
  return states;
}

at::Tensor Speculator::Logits(int64_t step, const at::Tensor& states) const {
  return ops::Linear(states, output_weight(step));
}

absl::StatusOr<at::Tensor> Speculator::Draft(const at::Tensor& hidden, const at::Tensor& tokens,
                                             int64_t count) const {
  TANDEM_RETURN_IF_ERROR(CheckInRange("count", count, 1, sizes_.n_predict));
  if (hidden.dim() != 2 || hidden.size(1) != sizes_.hidden_size) {
    return InvalidField("hidden", absl::StrCat("must be [N, ", sizes_.hidden_size, "]"));
  }
  if (tokens.dim() != 1 || tokens.size(0) != hidden.size(0) || tokens.scalar_type() != at::kLong) {
    return InvalidField("tokens", "must be one int64 id per row of the hidden states");
  }
  const at::NoGradGuard no_grad;
  // Every row is a sequence of its own.
  std::vector<int64_t> offsets(static_cast<size_t>(hidden.size(0)) + 1);
  std::iota(offsets.begin(), offsets.end(), 0);
  const std::unique_ptr<SpeculatorPass> pass =
      Begin({.hidden = hidden, .offsets = std::move(offsets)});
  std::vector<at::Tensor> drafts;
  at::Tensor last = tokens;
  for (int64_t step = 0; step < count; ++step) {
    const at::Tensor state = pass->Step(last);
    const SpeculatorParameter& head = head_parameter(step);
    last = head.packed == nullptr ? ArgmaxRows(state, output_weight(step))
                                  : ArgmaxRows(state, *head.packed, num_token_ids_);
    drafts.push_back(last);
  }
  return at::stack(drafts, /*dim=*/1);
}

}  // namespace tandem::speculator
