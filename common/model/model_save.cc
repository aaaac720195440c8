// Model::Save: a directory that `transformers` loads.
#include <ATen/ATen.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <string>

#include "absl/strings/str_cat.h"
#include "common/base/atomic_file.h"
#include "common/base/file_descriptor.h"
#include "common/base/status_macros.h"
#include "common/model/family.h"
#include "common/model/model.h"
#include "common/model/parameter_store.h"
#include "common/model/stacked_tensors.h"
#include "common/tensor/aten_bytes.h"
#include "common/tensor/safetensors.h"
#include "common/tensor/tensor_memory.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr absl::string_view kTokenizerFile = "tokenizer.json";

// The files that a usable directory has beside the weights; copied if the source still has them.
constexpr const char* kCompanionFiles[] = {"generation_config.json",
                                           "tokenizer.json",
                                           "tokenizer_config.json",
                                           "tokenizer.model",
                                           "vocab.json",
                                           "merges.txt",
                                           "special_tokens_map.json",
                                           "added_tokens.json",
                                           "chat_template.jinja",
                                           "processor_config.json",
                                           "preprocessor_config.json",
                                           "video_preprocessor_config.json"};

}  // namespace

std::string Model::ExportedConfig(DType dtype) const {
  json config = json::parse(config_.raw_json);
  const char* const dtype_key =
      config.contains("torch_dtype") && !config.contains("dtype") ? "torch_dtype" : "dtype";
  config[dtype_key] = std::string(TorchDTypeName(dtype));
  const bool biased = store_->Find(kValueHeadBias) != nullptr;
  // A sequence classifier has the same score.weight, but no bias.
  const char* const critic_suffix = family_->has_token_classifier() || biased
                                        ? "ForTokenClassification"
                                        : "ForSequenceClassification";
  config["architectures"] = {head_ == HeadKind::kLm
                                 ? family_->language_model_class()
                                 : absl::StrCat(family_->classifier_prefix(), critic_suffix)};
  config["tie_word_embeddings"] = tied_;
  // Older files say it of the text model, and `transformers` reads both.
  if (const auto text = config.find("text_config");
      text != config.end() && text->contains("tie_word_embeddings")) {
    (*text)["tie_word_embeddings"] = tied_;
  }
  if (head_ == HeadKind::kValue) {
    config["num_labels"] = 1;
    config["id2label"] = {{"0", "VALUE"}};
    config["label2id"] = {{"VALUE", 0}};
    config["classifier_dropout"] = 0.0;
    config["token_classification_bias"] = biased;
  }
  return absl::StrCat(config.dump(2), "\n");
}

absl::Status Model::VisitKeptTensors(TensorVisitor visit) const {
  if (kept_tensors_.empty()) return absl::OkStatus();
  TANDEM_ASSIGN_OR_RETURN(const auto files, SafetensorsDirectory::Open(source_directory_));
  std::map<std::string, const TensorView*> by_name;
  for (const TensorView& view : files->tensors()) {
    by_name[family_->ParameterName(view.name)] = &view;
  }
  for (const WeightSpec& spec : kept_tensors_) {
    const auto found = by_name.find(spec.name);
    const TensorView* const view = found == by_name.end() ? nullptr : found->second;
    if (view == nullptr || view->dtype != spec.dtype || view->shape != spec.shape) {
      return absl::FailedPreconditionError(
          absl::StrCat(source_directory_, ": tensor '", spec.name,
                       "' is not what it was when the model was loaded: an export keeps it"));
    }
    TANDEM_RETURN_IF_ERROR(visit(spec.name, AliasAsAten(*view)));
  }
  return absl::OkStatus();
}

absl::Status Model::Save(const std::string& directory, DType dtype) const {
  if (placement_.weight_format != kernels::WeightFormat::kDense) {
    return absl::UnimplementedError("a model with packed weights cannot be saved");
  }
  const auto& buffers = BlockBuffers();
  if (!IsWhole() || !std::all_of(buffers.begin(), buffers.end(), HasMemory)) {
    return absl::UnimplementedError(
        "a model of which this process holds only some blocks or shards cannot be saved");
  }
  return Save(directory, dtype, SourceOf(Parameters()));
}

absl::Status Model::Save(const std::string& directory, DType dtype, TensorSource parameters) const {
  if (config_.raw_json.empty()) {
    return absl::FailedPreconditionError("the model was built without the text of a config.json");
  }
  std::error_code error;
  fs::create_directories(directory, error);
  if (error) return FileError(error.value(), "cannot create", directory);
  const fs::path target(directory);
  std::vector<WeightSpec> parameter_specs = WeightSpecs(dtype);
  // `transformers` keeps buffers in float32, whatever the type of the weights.
  for (size_t i = 0; i < parameter_specs.size(); ++i) {
    if (!store_->parameters()[i].spec.trains) parameter_specs[i].dtype = DType::kFloat32;
  }
  const std::vector<StackedTensor> stacks = StackedTensors();
  std::vector<WeightSpec> specs = ExportedSpecs(stacks, parameter_specs);
  specs.insert(specs.end(), kept_tensors_.begin(), kept_tensors_.end());
  const auto all = [&](TensorVisitor visit) -> absl::Status {
    TANDEM_RETURN_IF_ERROR(VisitExported(stacks, parameters, visit));
    return VisitKeptTensors(visit);
  };
  TANDEM_RETURN_IF_ERROR(
      WriteTensors(target / "model.safetensors", specs, all, {{"format", "pt"}}));
  for (const char* name : kCompanionFiles) {
    const fs::path source = fs::path(source_directory_) / name;
    if (name == kTokenizerFile && num_token_ids_ < config_.vocab_size &&
        !fs::exists(source, error)) {
      return absl::FailedPreconditionError(absl::StrCat(
          source.string(), " is gone: it says which ", num_token_ids_, " of the ",
          config_.vocab_size, " rows of the vocabulary have a token, and belongs to every copy"));
    }
    if (source_directory_.empty() || !fs::exists(source, error) ||
        fs::equivalent(source.parent_path(), target, error)) {
      continue;
    }
    TANDEM_RETURN_IF_ERROR(CopyFileDurably(source, target / name));
  }
  return WriteFileAtomically(target / "config.json", ExportedConfig(dtype));
}

}  // namespace tandem
