// Model::Load and ReadSource: every tensor of a checkpoint is assigned to a parameter, and one that
// is left over is an error.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <deque>
#include <filesystem>
#include <map>
#include <memory>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "common/base/errors/error.h"
#include "common/base/errors/status_macros.h"
#include "common/model/family.h"
#include "common/model/loading/peft_files.h"
#include "common/model/loading/stacked_tensors.h"
#include "common/model/loading/value_head_tensors.h"
#include "common/model/loading/weight_files_check.h"
#include "common/model/model.h"
#include "common/model/parameters/initial_value.h"
#include "common/model/parameters/parameter_store.h"
#include "common/tensor/aten/aten_bytes.h"
#include "common/tensor/aten/tensor_check.h"
#include "common/tensor/safetensors/safetensors.h"
#include "common/weights/weights_digest.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;

// Constants that old versions of `transformers` saved with the weights.
bool IsOldBuffer(absl::string_view name) { return absl::EndsWith(name, ".rotary_emb.inv_freq"); }

// The mapped weight files of a model directory.
struct ModelFiles {
  std::unique_ptr<SafetensorsDirectory> directory;
  std::unique_ptr<SafetensorsFile> value_head_file;  // may be null
  std::unique_ptr<SafetensorsFile> adapter_file;     // may be null
  // The tensors of all three, under the names of their parameters (Family::ParameterName).
  std::vector<const TensorView*> tensors;
  std::deque<TensorView> renamed;
  std::deque<TensorView> unstacked;  // views into tensors of several parameters
  ValueHeadTensors value_head;       // with kValue

  // `adapter` is a directory in PEFT's format, or empty.
  static absl::StatusOr<ModelFiles> Open(const std::string& directory, const std::string& adapter,
                                         HeadKind head, const Family& family) {
    ModelFiles files;
    TANDEM_ASSIGN_OR_RETURN(files.directory, SafetensorsDirectory::Open(directory));
    for (const TensorView& view : files.directory->tensors()) {
      files.Add(view, family.ParameterName(view.name));
    }
    if (!adapter.empty()) {
      TANDEM_ASSIGN_OR_RETURN(files.adapter_file,
                              SafetensorsFile::Open(fs::path(adapter) / kAdapterWeightsFile));
      for (const TensorView& view : files.adapter_file->tensors()) {
        files.Add(view, family.ParameterName(absl::StripPrefix(view.name, kPeftPrefix)));
      }
    }
    if (head != HeadKind::kValue) return files;
    const std::string path = fs::path(directory) / "value_head.safetensors";
    std::error_code ignored;
    if (fs::exists(path, ignored)) {
      TANDEM_ASSIGN_OR_RETURN(files.value_head_file, SafetensorsFile::Open(path));
      for (const TensorView& view : files.value_head_file->tensors()) {
        files.tensors.push_back(&view);
      }
    }
    TANDEM_ASSIGN_OR_RETURN(files.value_head, FindValueHead(files.tensors));
    return files;
  }

  void Add(const TensorView& view, std::string name) {
    tensors.push_back(&view);
    if (name == view.name) return;
    renamed.push_back(view);
    renamed.back().name = std::move(name);
    tensors.back() = &renamed.back();
  }
};

// Returns the tensor of each of `specs`, in their order; nullptr for a value head that the files
// lack, and for adapters without files. A tensor without a parameter is an error.
absl::StatusOr<std::vector<const TensorView*>> Assign(const ModelFiles& files,
                                                      const std::vector<ParameterSpec>& specs,
                                                      const ModelConfig& config,
                                                      const HeadOptions& head) {
  TANDEM_ASSIGN_OR_RETURN(const Family* family, FindFamily(config.model_type));
  std::map<std::string, const ParameterSpec*> by_name;
  for (const ParameterSpec& spec : specs) by_name[spec.name] = &spec;
  std::map<std::string, const TensorView*> given;  // by parameter
  const TensorView* tied_head = nullptr;
  for (const TensorView* view : files.tensors) {
    std::string name = view->name;
    if (view == files.value_head.weight) name = kValueHeadWeight;
    if (view == files.value_head.bias) name = kValueHeadBias;
    const bool is_tied_head = head.tied && name == kLmHeadName;
    if (const auto spec = by_name.find(is_tied_head ? kEmbeddingName : name);
        spec != by_name.end()) {
      TANDEM_RETURN_IF_ERROR(CheckFloatTensor(*view, spec->second->shape));
      const TensorView*& place = is_tied_head ? tied_head : given[name];
      if (place != nullptr) return TensorError(*view, "unexpected: given twice");
      place = view;
    } else if (name == kLmHeadName && head.kind != HeadKind::kLm) {
      continue;  // replaced by the head that was asked for
    } else if (!IsOldBuffer(name) && !family->KeepsTensor(config, name)) {
      return TensorError(*view, "unexpected: the model has no such parameter");
    }
  }
  // An untied copy of a tied model starts with the head it had.
  if (head.kind == HeadKind::kLm && config.tie_word_embeddings && !head.tied &&
      !given.contains(kLmHeadName) && given.contains(kEmbeddingName)) {
    given[kLmHeadName] = given[kEmbeddingName];
  }
  std::vector<const TensorView*> assigned;
  for (const ParameterSpec& spec : specs) {
    const auto found = given.find(spec.name);
    assigned.push_back(found == given.end() ? nullptr : found->second);
    const bool is_drawn =
        spec.name == kValueHeadWeight || (spec.adapts && files.adapter_file == nullptr);
    if (assigned.back() == nullptr && !is_drawn) {
      return absl::InvalidArgumentError(
          absl::StrCat(files.directory->directory(), ": tensor '", spec.name, "': missing"));
    }
  }
  if (tied_head != nullptr && !at::equal(AliasAsAten(*tied_head).to(at::kFloat),
                                         AliasAsAten(*given[kEmbeddingName]).to(at::kFloat))) {
    return TensorError(*tied_head, absl::StrCat("differs from '", kEmbeddingName,
                                                "' though config.json ties them"));
  }
  return assigned;
}

// Returns the values of one parameter. Those that the files lack are drawn.
at::Tensor WholeTensor(const ParameterSpec& spec, const TensorView* view, double initializer_range,
                       uint64_t value_head_seed, const LoraOptions& lora) {
  if (view != nullptr) return AliasAsAten(*view);
  if (spec.adapts) return InitialAdapter(spec, lora);
  return InitialValue(spec, initializer_range, at::detail::createCPUGenerator(value_head_seed));
}

// Returns the part of a tensor that Model::source_mark covers.
at::Tensor Beginning(const at::Tensor& whole) {
  constexpr int64_t kValues = 256;
  return whole.reshape(-1).narrow(0, 0, std::min(whole.numel(), kValues));
}

}  // namespace

absl::StatusOr<std::unique_ptr<Model>> Model::Load(const std::string& directory,
                                                   const LoadOptions& given) {
  TANDEM_ASSIGN_OR_RETURN(const ModelConfig config, LoadModelConfig(directory));
  TANDEM_ASSIGN_OR_RETURN(const Family* family, FindFamily(config.model_type));
  LoadOptions options = given;
  TANDEM_ASSIGN_OR_RETURN(options.lora, ResolveLora(given.lora));
  if (options.requires_grad) TANDEM_RETURN_IF_ERROR(NoteDropout(options.lora));
  TANDEM_ASSIGN_OR_RETURN(ModelFiles files,
                          ModelFiles::Open(directory, options.lora.path, options.head, *family));
  TANDEM_RETURN_IF_ERROR(CheckSizes(config, *files.directory));
  TANDEM_RETURN_IF_ERROR(
      Unstack(family->StackedTensors(config), directory, files.tensors, files.unstacked));
  if (options.head == HeadKind::kValue && config.tie_word_embeddings &&
      files.value_head.weight == nullptr && !options.untie_embeddings) {
    return InvalidField("untie_embeddings",
                        absl::StrCat("is false, but the base model in ", directory,
                                     " ties its head to the embeddings: true keeps the embeddings "
                                     "and gives it a new head"));
  }
  const HeadOptions head = {.kind = options.head,
                            .tied = options.head == HeadKind::kLm && config.tie_word_embeddings &&
                                    !options.untie_embeddings,
                            .bias = files.value_head.bias != nullptr};
  // The files are checked before memory is taken.
  TANDEM_ASSIGN_OR_RETURN(const std::vector<ParameterSpec> specs,
                          ModelParameters(config, head, options.lora));
  TANDEM_ASSIGN_OR_RETURN(const std::vector<const TensorView*> assigned,
                          Assign(files, specs, config, head));
  TANDEM_ASSIGN_OR_RETURN(auto model, Build(config, head, options));
  for (const TensorView* view : files.tensors) {
    if (!family->KeepsTensor(config, view->name)) continue;
    model->kept_tensors_.push_back(
        {.name = view->name, .dtype = view->dtype, .shape = view->shape});
  }
  // Others compare it, and look for its files, from other working directories.
  model->source_directory_ = fs::absolute(directory).lexically_normal().string();
  model->value_head_seed_ = options.value_head_seed;
  if (options.head == HeadKind::kValue) {
    model->value_head_source_ = files.value_head.weight != nullptr ? ValueHeadSource::kCheckpoint
                                                                   : ValueHeadSource::kRandom;
  }
  model->FillFrom(assigned, options);
  return model;
}

absl::StatusOr<SourceParameters> Model::ReadSource() const {
  const at::NoGradGuard no_grad;
  TANDEM_ASSIGN_OR_RETURN(ModelFiles opened,
                          ModelFiles::Open(source_directory_, lora_.path, head_, *family_));
  TANDEM_RETURN_IF_ERROR(
      Unstack(StackedTensors(), source_directory_, opened.tensors, opened.unstacked));
  const auto files = std::make_shared<const ModelFiles>(std::move(opened));
  std::vector<ParameterSpec> specs;
  for (const auto& parameter : store_->parameters()) specs.push_back(parameter.spec);
  TANDEM_ASSIGN_OR_RETURN(const std::vector<const TensorView*> assigned,
                          Assign(*files, specs, config_, {.kind = head_, .tied = tied_}));
  SourceParameters source{.files = files, .tensors = {}};
  for (size_t i = 0; i < specs.size(); ++i) {
    source.tensors.emplace_back(
        specs[i].name,
        WholeTensor(specs[i], assigned[i], config_.initializer_range, value_head_seed_, lora_));
  }
  return source;
}

std::string SourceParameters::Mark() const {
  WeightsHasher hasher;
  for (const auto& [name, tensor] : tensors) hasher.Add(name, Beginning(tensor));
  return hasher.Hex();
}

void Model::FillFrom(const std::vector<const TensorView*>& assigned, const LoadOptions& options) {
  const at::NoGradGuard no_grad;
  WeightsHasher hasher, mark;
  for (size_t i = 0; i < assigned.size(); ++i) {
    const auto& parameter = store_->parameters()[i];
    const at::Tensor whole = WholeTensor(parameter.spec, assigned[i], config_.initializer_range,
                                         value_head_seed_, lora_);
    mark.Add(parameter.spec.name, Beginning(whole));
    bool exact = false;
    // Else another process holds it, or the caller reads it.
    if (parameter.held() && (!options.without_memory || parameter.has_own_memory())) {
      parameter.CopyFrom(whole);
      exact = parameter.value.defined() && parameter.shard.count == 1 && parameter.value.is_cpu() &&
              parameter.value.scalar_type() == at::kFloat;
    }
    if (options.computes_digest) hasher.Add(parameter.spec.name, exact ? parameter.value : whole);
  }
  if (options.computes_digest) RecordDigest(hasher.Sums());
  source_mark_ = mark.Hex();
  OnWeightsChanged();
}

}  // namespace tandem
