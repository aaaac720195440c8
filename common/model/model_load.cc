// Model::Load: which tensor of a checkpoint becomes which parameter, with nothing left over.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/grad_mode.h>

#include <filesystem>
#include <map>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/base/error.h"
#include "common/base/status_macros.h"
#include "common/model/backbone.h"
#include "common/model/family_registry.h"
#include "common/model/initial_value.h"
#include "common/model/model.h"
#include "common/model/parameter_store.h"
#include "common/model/value_head_tensors.h"
#include "common/tensor/aten_bytes.h"
#include "common/tensor/safetensors.h"
#include "common/tensor/weights_digest.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;

absl::Status TensorError(const TensorView& view, absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat(view.file, ": tensor '", view.name, "': ", what));
}

absl::Status CheckFits(const TensorView& view, const std::vector<int64_t>& shape) {
  if (view.shape != shape) {
    return TensorError(view, absl::StrCat("shape [", absl::StrJoin(view.shape, ", "),
                                          "], expected [", absl::StrJoin(shape, ", "), "]"));
  }
  if (!c10::isFloatingType(ToScalarType(view.dtype))) {
    return TensorError(view,
                       absl::StrCat("type ", DTypeName(view.dtype), " is not floating-point"));
  }
  return absl::OkStatus();
}

// Constants that old versions of `transformers` saved with the weights.
bool IsOldBuffer(absl::string_view name) { return absl::EndsWith(name, ".rotary_emb.inv_freq"); }

}  // namespace

absl::StatusOr<std::unique_ptr<Model>> Model::Load(const std::string& directory,
                                                   const LoadOptions& options) {
  TANDEM_ASSIGN_OR_RETURN(const ModelConfig config, LoadModelConfig(directory));
  TANDEM_RETURN_IF_ERROR(FindFamily(config.model_type).status());
  TANDEM_ASSIGN_OR_RETURN(const auto checkpoint, SafetensorsDirectory::Open(directory));

  std::vector<const TensorView*> tensors;
  for (const TensorView& view : checkpoint->tensors()) tensors.push_back(&view);
  std::unique_ptr<SafetensorsFile> value_head_file;
  const std::string value_head_path = fs::path(directory) / "value_head.safetensors";
  std::error_code ignored;
  if (options.head == HeadKind::kValue && fs::exists(value_head_path, ignored)) {
    TANDEM_ASSIGN_OR_RETURN(value_head_file, SafetensorsFile::Open(value_head_path));
    for (const TensorView& view : value_head_file->tensors()) tensors.push_back(&view);
  }
  ValueHeadTensors value_head;
  if (options.head == HeadKind::kValue) {
    TANDEM_ASSIGN_OR_RETURN(value_head, FindValueHead(tensors));
    if (config.tie_word_embeddings && value_head.weight == nullptr && !options.untie_embeddings) {
      return InvalidField("use_value_head",
                          absl::StrCat("the base model in ", directory,
                                       " ties its head to the embeddings; set "
                                       "untie_embeddings to keep the embeddings and give "
                                       "it a new head"));
    }
  }
  const bool tied =
      options.head == HeadKind::kLm && config.tie_word_embeddings && !options.untie_embeddings;
  TANDEM_ASSIGN_OR_RETURN(
      auto model,
      Build(config, {.kind = options.head, .tied = tied, .bias = value_head.bias != nullptr},
            options));
  model->source_directory_ = directory;
  TANDEM_RETURN_IF_ERROR(model->FillFrom(tensors, value_head, options));
  return model;
}

absl::Status Model::FillFrom(const std::vector<const TensorView*>& tensors,
                             const ValueHeadTensors& value_head, const LoadOptions& options) {
  std::map<std::string, const TensorView*> given;  // by parameter
  const TensorView* tied_head = nullptr;
  for (const TensorView* view : tensors) {
    std::string name = view->name;
    if (view == value_head.weight) name = kValueHeadWeight;
    if (view == value_head.bias) name = kValueHeadBias;
    const bool is_tied_head = tied_ && name == kLmHeadName;
    if (const auto* parameter = store_->Find(is_tied_head ? kEmbeddingName : name);
        parameter != nullptr) {
      TANDEM_RETURN_IF_ERROR(CheckFits(*view, parameter->spec.shape));
      const TensorView*& place = is_tied_head ? tied_head : given[name];
      if (place != nullptr) return TensorError(*view, "unexpected: given twice");
      place = view;
    } else if (name == kLmHeadName && head_ != HeadKind::kLm) {
      continue;  // replaced by what options.head asks for
    } else if (IsValueHeadName(name) && head_ == HeadKind::kNone) {
      continue;
    } else if (!IsOldBuffer(name)) {
      return TensorError(*view, "unexpected: the model has no such parameter");
    }
  }
  if (head_ == HeadKind::kValue) {
    value_head_source_ =
        value_head.weight != nullptr ? ValueHeadSource::kCheckpoint : ValueHeadSource::kRandom;
  }
  // An untied copy of a tied model starts with the head it had.
  if (head_ == HeadKind::kLm && config_.tie_word_embeddings && !tied_ &&
      !given.contains(kLmHeadName) && given.contains(kEmbeddingName)) {
    given[kLmHeadName] = given[kEmbeddingName];
  }
  for (const auto& parameter : store_->parameters()) {
    const bool random =
        value_head_source_ == ValueHeadSource::kRandom && parameter.spec.name == kValueHeadWeight;
    if (!random && !given.contains(parameter.spec.name)) {
      return absl::InvalidArgumentError(
          absl::StrCat(source_directory_, ": tensor '", parameter.spec.name, "': missing"));
    }
  }

  const at::NoGradGuard no_grad;
  WeightsHasher hasher;
  for (const auto& parameter : store_->parameters()) {
    const auto found = given.find(parameter.spec.name);
    const at::Tensor whole =
        found != given.end()
            ? AliasAsAten(*found->second)
            : InitialValue(parameter.spec, config_.initializer_range,
                           at::detail::createCPUGenerator(options.value_head_seed));
    parameter.value.copy_(parameter.shard.Of(whole));  // reads no more of the file than this
    if (placement_.shard_count > 1) continue;
    const bool exact = parameter.value.is_cpu() && parameter.value.scalar_type() == at::kFloat;
    hasher.Add(exact ? parameter.value : whole);
  }
  if (placement_.shard_count == 1) weights_digest_ = hasher.Hex();
  OnWeightsChanged();
  if (tied_head != nullptr && !at::equal(AliasAsAten(*tied_head).to(at::kFloat),
                                         AliasAsAten(*given[kEmbeddingName]).to(at::kFloat))) {
    return TensorError(*tied_head, absl::StrCat("differs from '", kEmbeddingName,
                                                "' though config.json ties them"));
  }
  return absl::OkStatus();
}

}  // namespace tandem
