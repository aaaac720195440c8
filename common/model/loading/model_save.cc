// Model::Save: a directory that `transformers` loads.
#include <ATen/ATen.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/base/errors/status_macros.h"
#include "common/base/files/atomic_file.h"
#include "common/base/files/file_descriptor.h"
#include "common/base/files/paths/confined_folder.h"
#include "common/model/family.h"
#include "common/model/loading/merged_adapters.h"
#include "common/model/loading/peft_files.h"
#include "common/model/loading/stacked_tensors.h"
#include "common/model/model.h"
#include "common/model/parameters/parameter_store.h"
#include "common/tensor/aten/aten_bytes.h"
#include "common/tensor/aten/tensor_memory.h"
#include "common/tensor/safetensors/safetensors.h"

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

constexpr char kIndexFile[] = "model.safetensors.index.json";

std::string WeightFile(int file, int count) {
  if (count == 1) return "model.safetensors";
  return absl::StrFormat("model-%05d-of-%05d.safetensors", file + 1, count);
}

// Returns the text of the index: which file has which tensor.
std::string IndexOf(const Model::ExportPlan& plan) {
  int64_t total = 0;
  json map = json::object();
  for (size_t i = 0; i < plan.tensors.size(); ++i) {
    total += plan.tensors[i].bytes();
    map[plan.tensors[i].name] = WeightFile(plan.file_of_tensor[i], plan.count);
  }
  const json index = {{"metadata", {{"total_size", total}}}, {"weight_map", map}};
  return absl::StrCat(index.dump(2), "\n");
}

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

absl::Status Model::VisitKeptTensors(const std::set<std::string>& wanted,
                                     TensorVisitor visit) const {
  const bool reads =
      std::any_of(kept_tensors_.begin(), kept_tensors_.end(),
                  [&](const WeightSpec& spec) { return wanted.contains(spec.name); });
  if (!reads) return absl::OkStatus();
  TANDEM_ASSIGN_OR_RETURN(const auto files, SafetensorsDirectory::Open(source_directory_));
  std::map<std::string, const TensorView*> by_name;
  for (const TensorView& view : files->tensors()) {
    by_name[family_->ParameterName(view.name)] = &view;
  }
  for (const WeightSpec& spec : kept_tensors_) {
    if (!wanted.contains(spec.name)) continue;
    const auto found = by_name.find(spec.name);
    const TensorView* const view = found == by_name.end() ? nullptr : found->second;
    if (view == nullptr || view->dtype != spec.dtype || view->shape != spec.shape) {
      return absl::FailedPreconditionError(absl::StrCat(
          source_directory_, ": tensor '", spec.name,
          "' has changed since the model was loaded, and an export must contain it unchanged"));
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
  const auto is_here = [](const at::Tensor& buffer) {
    return buffer.numel() == 0 || HasMemory(buffer);
  };
  if (!IsWhole() || !std::all_of(buffers.begin(), buffers.end(), is_here)) {
    return absl::UnimplementedError(
        "a model cannot be saved by a process that holds only some of its blocks or shards");
  }
  return Save(directory, dtype, SourceOf(Parameters()));
}

absl::Status Model::Save(const std::string& directory, DType dtype, TensorSource parameters) const {
  const ExportPlan plan = PlanExport(dtype, 1);
  TANDEM_RETURN_IF_ERROR(SaveFile(directory, plan, 0, parameters));
  return SaveCompanionFiles(directory, plan);
}

Model::ExportPlan Model::PlanExport(DType dtype, int most_files) const {
  ExportPlan plan;
  plan.dtype = dtype;
  std::vector<WeightSpec> parameter_specs;
  for (const auto& parameter : store_->parameters()) {
    const ParameterSpec& spec = parameter.spec;
    if (spec.adapts) continue;  // merged
    // `transformers` keeps buffers in float32, whatever the type of the weights.
    parameter_specs.push_back(
        {.name = spec.name, .dtype = spec.trains ? dtype : DType::kFloat32, .shape = spec.shape});
  }
  const std::vector<StackedTensor> stacks = StackedTensors();
  plan.tensors = ExportedSpecs(stacks, parameter_specs);
  plan.tensors.insert(plan.tensors.end(), kept_tensors_.begin(), kept_tensors_.end());
  plan.count = std::max(1, std::min(most_files, static_cast<int>(plan.tensors.size())));
  // The next tensor goes to the file with fewest bytes, so that tensors that follow each other are
  // written at the same time.
  std::vector<int64_t> bytes(static_cast<size_t>(plan.count));
  std::map<std::string, int> files;
  for (const WeightSpec& tensor : plan.tensors) {
    const auto least = std::min_element(bytes.begin(), bytes.end());
    *least += std::max<int64_t>(1, tensor.bytes());
    plan.file_of_tensor.push_back(static_cast<int>(least - bytes.begin()));
    files[tensor.name] = plan.file_of_tensor.back();
  }
  std::map<std::string, std::string> stack_of;  // by parameter
  for (const StackedTensor& stack : stacks) {
    if (!stack.is_exported) continue;
    for (const StackedParameter& parameter : stack.parameters)
      stack_of[parameter.name] = stack.name;
  }
  for (const WeightSpec& parameter : parameter_specs) {
    const auto stack = stack_of.find(parameter.name);
    plan.file_of_parameter[parameter.name] =
        files.at(stack == stack_of.end() ? parameter.name : stack->second);
  }
  for (const auto& parameter : store_->parameters()) {
    const std::string& name = parameter.spec.name;
    if (!parameter.spec.adapts) continue;
    plan.file_of_parameter[name] =
        plan.file_of_parameter.at(absl::StrCat(AdaptedMap(name), ".weight"));
  }
  return plan;
}

absl::Status Model::SaveFile(const std::string& directory, const ExportPlan& plan, int file,
                             TensorSource parameters) const {
  if (config_.raw_json.empty()) {
    return absl::FailedPreconditionError("the model was built without the text of a config.json");
  }
  std::error_code error;
  fs::create_directories(SystemPath(directory), error);
  if (error) return FileError(error.value(), "cannot create", directory);
  std::vector<WeightSpec> specs;
  std::set<std::string> names;
  for (size_t i = 0; i < plan.tensors.size(); ++i) {
    if (plan.file_of_tensor[i] != file) continue;
    specs.push_back(plan.tensors[i]);
    names.insert(plan.tensors[i].name);
  }
  const auto merged = [&](TensorVisitor visit) { return VisitMerged(lora_, parameters, visit); };
  const auto all = [&](TensorVisitor visit) -> absl::Status {
    TANDEM_RETURN_IF_ERROR(VisitExported(StackedTensors(), merged, visit));
    return VisitKeptTensors(names, visit);
  };
  return WriteTensors(fs::path(directory) / WeightFile(file, plan.count), specs, all,
                      {{"format", "pt"}});
}

absl::Status Model::SaveAdapters(const std::string& directory, TensorSource parameters) const {
  std::vector<ParameterSpec> specs;
  std::vector<WeightSpec> tensors;
  for (const auto& parameter : store_->parameters()) {
    specs.push_back(parameter.spec);
    if (!IsInAdapterFile(parameter)) continue;
    tensors.push_back({.name = absl::StrCat(kPeftPrefix, parameter.spec.name),
                       .dtype = DType::kFloat32,
                       .shape = parameter.spec.shape});
  }
  const auto saved = [&](TensorVisitor visit) {
    return parameters([&](const std::string& name, const at::Tensor& tensor) -> absl::Status {
      if (!IsInAdapterFile(*store_->Find(name))) return absl::OkStatus();
      return visit(absl::StrCat(kPeftPrefix, name), tensor);
    });
  };
  TANDEM_RETURN_IF_ERROR(
      WriteTensors(fs::path(directory) / kAdapterWeightsFile, tensors, saved, {{"format", "pt"}}));
  return WriteAdapterConfig(directory, lora_, specs, source_directory_);
}

absl::Status Model::SaveCompanionFiles(const std::string& directory, const ExportPlan& plan) const {
  const fs::path target(directory);
  std::error_code error;
  for (const char* name : kCompanionFiles) {
    const fs::path source = fs::path(source_directory_) / name;
    if (name == kTokenizerFile && num_token_ids_ < config_.vocab_size &&
        !fs::exists(source, error)) {
      return absl::FailedPreconditionError(absl::StrCat(
          source.string(), " is missing: it says which ", num_token_ids_, " of the ",
          config_.vocab_size, " rows of the vocabulary have a token, and every copy needs it"));
    }
    if (source_directory_.empty() || !fs::exists(source, error) ||
        fs::equivalent(source.parent_path(), SystemPath(directory), error)) {
      continue;
    }
    TANDEM_RETURN_IF_ERROR(CopyFileDurably(source, target / name));
  }
  if (plan.count > 1) {
    TANDEM_RETURN_IF_ERROR(WriteFileAtomically(target / kIndexFile, IndexOf(plan)));
  }
  return WriteFileAtomically(target / "config.json", ExportedConfig(plan.dtype));
}

}  // namespace tandem
