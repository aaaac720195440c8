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
#include "common/model/model.h"
#include "common/model/parameter_store.h"
#include "common/model/value_head_tensors.h"
#include "common/tensor/aten_bytes.h"
#include "common/tensor/safetensors.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;

constexpr char kEmbeddingName[] = "model.embed_tokens.weight";

absl::Status TensorError(const TensorView& view, absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat(view.file, ": tensor '", view.name, "': ", what));
}

absl::Status CheckFits(const TensorView& view, const at::Tensor& parameter) {
  if (at::IntArrayRef(view.shape) != parameter.sizes()) {
    return TensorError(view,
                       absl::StrCat("shape [", absl::StrJoin(view.shape, ", "), "], expected [",
                                    absl::StrJoin(parameter.sizes(), ", "), "]"));
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
  TANDEM_ASSIGN_OR_RETURN(auto model, Build(config, options.head, tied, value_head.bias != nullptr,
                                            options.requires_grad));
  model->source_directory_ = directory;
  TANDEM_RETURN_IF_ERROR(model->FillFrom(tensors, value_head, options));
  return model;
}

absl::Status Model::FillFrom(const std::vector<const TensorView*>& tensors,
                             const ValueHeadTensors& value_head, const LoadOptions& options) {
  std::map<std::string, at::Tensor> missing(store_->parameters().begin(),
                                            store_->parameters().end());
  const TensorView* tied_head = nullptr;
  std::vector<std::pair<const TensorView*, at::Tensor>> copies;
  for (const TensorView* view : tensors) {
    std::string name = view->name;
    if (view == value_head.weight) name = kValueHeadWeight;
    if (view == value_head.bias) name = kValueHeadBias;
    const auto found = missing.find(name);
    if (found != missing.end()) {
      TANDEM_RETURN_IF_ERROR(CheckFits(*view, found->second));
      copies.emplace_back(view, found->second);
      missing.erase(found);
    } else if (name == kLmHeadName && tied_) {
      TANDEM_RETURN_IF_ERROR(CheckFits(*view, lm_head_));
      tied_head = view;
    } else if (name == kLmHeadName && head_ != HeadKind::kLm) {
      continue;  // replaced by what options.head asks for
    } else if (IsValueHeadName(name) && head_ == HeadKind::kNone) {
      continue;
    } else if (!IsOldBuffer(name)) {
      return TensorError(*view, "unexpected: the model has no such parameter");
    }
  }

  at::NoGradGuard no_grad;
  if (head_ == HeadKind::kValue) {
    value_head_source_ =
        value_head.weight != nullptr ? ValueHeadSource::kCheckpoint : ValueHeadSource::kRandom;
    if (value_head.weight == nullptr) {
      value_head_.normal_(0.0, config_.initializer_range,
                          at::detail::createCPUGenerator(options.value_head_seed));
      missing.erase(kValueHeadWeight);
    }
  }
  // An untied copy of a tied model starts with the head it had.
  const bool head_from_embedding = head_ == HeadKind::kLm && config_.tie_word_embeddings &&
                                   !tied_ && missing.erase(kLmHeadName) > 0;
  if (!missing.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat(source_directory_, ": tensor '", missing.begin()->first, "': missing"));
  }
  for (const auto& [view, parameter] : copies) CopyInto(*view, parameter);
  if (head_from_embedding) lm_head_.copy_(backbone_->embedding());
  if (tied_head != nullptr && !at::equal(ToAten(*tied_head).to(at::kFloat), lm_head_)) {
    return TensorError(*tied_head, absl::StrCat("differs from '", kEmbeddingName,
                                                "' though config.json ties them"));
  }
  return absl::OkStatus();
}

}  // namespace tandem
