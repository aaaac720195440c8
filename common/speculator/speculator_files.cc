#include "common/speculator/speculator_files.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "common/base/bounded_json.h"
#include "common/base/errors/error.h"
#include "common/base/errors/status_macros.h"
#include "common/base/files/atomic_file.h"
#include "common/base/files/file_descriptor.h"
#include "common/base/files/paths/confined_folder.h"
#include "common/model/config/config_fields.h"
#include "common/speculator/speculator_kind.h"
#include "common/speculator/speculator_update.h"
#include "common/tensor/aten/aten_bytes.h"
#include "common/tensor/aten/tensor_check.h"
#include "common/tensor/safetensors/safetensors.h"
#include "common/weights/weights_digest.h"

namespace tandem::speculator {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr size_t kMaxConfigBytes = 1'000'000;

bool SameValues(const TensorView& a, const TensorView& b) {
  return at::equal(AliasAsAten(a).to(at::kDouble), AliasAsAten(b).to(at::kDouble));
}

absl::StatusOr<std::unique_ptr<SafetensorsDirectory>> OpenWeights(const std::string& directory) {
  auto files = SafetensorsDirectory::Open(directory);
  std::error_code ignored;
  const fs::path pickle = fs::path(directory) / "pytorch_model.bin";
  if (absl::IsNotFound(files.status()) && fs::exists(pickle, ignored)) {
    return absl::UnimplementedError(absl::StrCat(
        pickle.string(), ": pickled weights are not supported (model.safetensors is)"));
  }
  return files;
}

// Returns the tensor of each parameter, in their order. A tensor without a parameter is an error.
absl::StatusOr<std::vector<const TensorView*>> Assign(
    const SafetensorsDirectory& files, const std::vector<SpeculatorParameter>& parameters) {
  std::map<std::string, size_t> by_name;
  for (size_t i = 0; i < parameters.size(); ++i) {
    by_name[parameters[i].spec.name] = i;
    for (const std::string& name : parameters[i].repeats) by_name[name] = i;
  }
  std::map<std::string, const TensorView*> given;
  std::vector<const TensorView*> assigned(parameters.size(), nullptr);
  for (const TensorView& view : files.tensors()) {
    const std::string name(absl::StripPrefix(view.name, "speculator."));
    const auto found = by_name.find(name);
    if (found == by_name.end()) {
      return TensorError(view, "unexpected: the speculator has no such parameter");
    }
    TANDEM_RETURN_IF_ERROR(CheckFloatTensor(view, parameters[found->second].spec.shape));
    if (!given.emplace(name, &view).second) return TensorError(view, "unexpected: given twice");
    const TensorView*& place = assigned[found->second];
    if (place != nullptr && !SameValues(*place, view)) {
      return TensorError(
          view, absl::StrCat("differs from '", place->name, "' though config.json ties them"));
    }
    if (place == nullptr) place = &view;
  }
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (assigned[i] == nullptr) {
      return absl::InvalidArgumentError(
          absl::StrCat(files.directory(), ": tensor '", parameters[i].spec.name, "': missing"));
    }
  }
  return assigned;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Speculator>> DeclareSpeculator(const std::string& directory,
                                                              const SpeculatorOptions& options) {
  TANDEM_ASSIGN_OR_RETURN(const std::string text,
                          ReadFile(fs::path(directory) / "config.json", kMaxConfigBytes));
  TANDEM_ASSIGN_OR_RETURN(const json config, ParseBoundedJson(text, "config.json"));
  if (!config.is_object()) return InvalidField("config.json", "must be an object");
  const ConfigFields fields(config, "config.json");
  TANDEM_ASSIGN_OR_RETURN(const SpeculatorKind* const kind, KindOfConfig(fields));
  TANDEM_ASSIGN_OR_RETURN(auto speculator, kind->create(fields, options));
  speculator->KeepOtherKeys(config);
  return speculator;
}

absl::StatusOr<std::unique_ptr<Speculator>> LoadSpeculator(const std::string& directory,
                                                           const SpeculatorOptions& options) {
  TANDEM_ASSIGN_OR_RETURN(auto speculator, DeclareSpeculator(directory, options));
  // The files are checked before memory is taken.
  TANDEM_ASSIGN_OR_RETURN(const auto files, OpenWeights(directory));
  TANDEM_ASSIGN_OR_RETURN(const std::vector<const TensorView*> assigned,
                          Assign(*files, speculator->parameters()));
  speculator->AllocateParameters();
  WeightsHasher hasher;
  for (size_t i = 0; i < assigned.size(); ++i) {
    const at::Tensor values = AliasAsAten(*assigned[i]).to(speculator->buffer().scalar_type());
    speculator->parameters()[i].Assign(values);
    hasher.Add(NameInUpdate(speculator->parameters()[i]), values);
  }
  speculator->SetLoadedDigest(hasher.Hex());
  return speculator;
}

SpeculatorFiles FilesOf(const Speculator& speculator) {
  const std::string& prefix = speculator.kind().file_prefix;
  SpeculatorFiles files = {.tensors = {}, .config = speculator.config()};
  for (const SpeculatorParameter& parameter : speculator.parameters()) {
    files.tensors.emplace_back(absl::StrCat(prefix, parameter.spec.name), parameter.value);
    for (const std::string& name : parameter.repeats) {
      files.tensors.emplace_back(absl::StrCat(prefix, name), parameter.value);
    }
  }
  return files;
}

absl::Status SaveSpeculator(const Speculator& speculator, const std::string& directory,
                            DType dtype) {
  return SaveSpeculator(FilesOf(speculator), directory, dtype);
}

absl::Status SaveSpeculator(const SpeculatorFiles& files, const std::string& directory,
                            DType dtype) {
  std::error_code error;
  fs::create_directories(SystemPath(directory), error);
  if (error) return FileError(error.value(), "cannot create", directory);
  const fs::path target(directory);
  TANDEM_RETURN_IF_ERROR(
      WriteNamedTensors(target / "model.safetensors", files.tensors, dtype, {{"format", "pt"}}));
  json config = files.config;
  const char* const dtype_key =
      config.contains("dtype") && !config.contains("torch_dtype") ? "dtype" : "torch_dtype";
  config[dtype_key] = std::string(TorchDTypeName(dtype));
  return WriteFileAtomically(target / "config.json", absl::StrCat(config.dump(2), "\n"));
}

}  // namespace tandem::speculator
