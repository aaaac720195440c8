#include "common/parallel/optimizer_state.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"
#include "common/base/bounded_json.h"
#include "common/base/status_macros.h"
#include "common/tensor/aten_bytes.h"
#include "common/tensor/safetensors.h"
#include "common/training/adamw.h"

namespace tandem::parallel {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr char kWholeFile[] = "optimizer.safetensors";
constexpr char kSlices[] = "slices";

// A part of a state tensor as a file holds it.
struct StoredPart {
  std::vector<int64_t> shape;  // of the whole
  int64_t offset = 0;
  at::Tensor values;  // [numel], in the file's memory
};

struct StoredState {
  std::vector<std::unique_ptr<SafetensorsFile>> files;
  std::map<std::string, std::vector<StoredPart>> parts;  // by tensor
  at::Tensor steps;
};

// "<parameter>" of "<parameter>.exp_avg".
std::string ParameterOf(absl::string_view tensor) {
  return std::string(tensor.substr(0, tensor.rfind('.')));
}

bool IsSlice(const json& slice) {
  return slice.is_object() && slice.contains("shape") && slice["shape"].is_array() &&
         std::all_of(slice["shape"].begin(), slice["shape"].end(),
                     [](const json& size) { return size.is_number_integer(); }) &&
         slice.contains("offset") && slice["offset"].is_number_integer();
}

// {"<parameter>": {"shape": [...], "offset": 0}}; empty where the file holds whole tensors.
absl::StatusOr<json> ReadSlices(const SafetensorsFile& file) {
  const auto found = file.metadata().find(kSlices);
  if (found == file.metadata().end()) return json::object();
  absl::StatusOr<json> slices = ParseBoundedJson(found->second, file.path());
  if (!slices.ok() || !slices->is_object() ||
      !std::all_of(slices->begin(), slices->end(), IsSlice)) {
    return absl::DataLossError(
        absl::StrCat(file.path(), ": its metadata do not say which slices it holds"));
  }
  return slices;
}

absl::Status AddFile(const std::string& path, StoredState& state) {
  TANDEM_ASSIGN_OR_RETURN(std::unique_ptr<SafetensorsFile> file, SafetensorsFile::Open(path));
  TANDEM_ASSIGN_OR_RETURN(const json slices, ReadSlices(*file));
  for (const TensorView& view : file->tensors()) {
    const at::Tensor values = AliasAsAten(view);
    if (view.name == training::kOptimizerSteps) {
      state.steps = values;
      continue;
    }
    StoredPart part = {.shape = view.shape, .values = values.reshape({-1})};
    if (const auto slice = slices.find(ParameterOf(view.name)); slice != slices.end()) {
      part.shape = slice->at("shape").get<std::vector<int64_t>>();
      part.offset = slice->at("offset").get<int64_t>();
    }
    state.parts[view.name].push_back(std::move(part));
  }
  state.files.push_back(std::move(file));
  return absl::OkStatus();
}

absl::StatusOr<StoredState> Open(const std::string& directory) {
  StoredState state;
  std::set<std::string> names;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(directory, error)) {
    const std::string name = entry.path().filename();
    const bool is_state = name == kWholeFile || (absl::StartsWith(name, "optimizer-") &&
                                                 absl::EndsWith(name, ".safetensors"));
    if (is_state) names.insert(name);
  }
  if (names.empty()) names.insert(kWholeFile);  // its error says what is missing
  for (const std::string& name : names) {
    TANDEM_RETURN_IF_ERROR(AddFile(absl::StrCat(directory, "/", name), state));
  }
  return state;
}

// The wanted values, from whichever parts hold them.
absl::StatusOr<at::Tensor> Assemble(const std::string& name, const StateSlice& slice,
                                    const std::vector<StoredPart>& parts) {
  at::Tensor values = at::empty({slice.numel}, parts[0].values.options());
  int64_t found = 0;
  for (const StoredPart& part : parts) {
    if (part.shape != slice.shape) {
      return absl::DataLossError(
          absl::StrCat("optimizer state: tensor '", name, "' has another shape"));
    }
    const int64_t from = std::max(slice.offset, part.offset);
    const int64_t to = std::min(slice.offset + slice.numel, part.offset + part.values.numel());
    if (from >= to) continue;
    values.narrow(0, from - slice.offset, to - from)
        .copy_(part.values.narrow(0, from - part.offset, to - from));
    found += to - from;
  }
  if (found != slice.numel) {
    return absl::DataLossError(absl::StrCat("optimizer state: tensor '", name, "' has ", found,
                                            " of ", slice.numel, " values"));
  }
  return values;
}

}  // namespace

absl::Status WriteOptimizerState(const std::string& directory, int rank, int ranks,
                                 const std::vector<StateSlice>& slices, const NamedTensors& state) {
  if (ranks == 1) return WriteNamedTensors(absl::StrCat(directory, "/", kWholeFile), state);
  json stored = json::object();
  for (const StateSlice& slice : slices) {
    stored[slice.parameter] = {{"shape", slice.shape}, {"offset", slice.offset}};
  }
  return WriteNamedTensors(
      absl::StrFormat("%s/optimizer-%05d-of-%05d.safetensors", directory, rank, ranks), state,
      std::nullopt, {{kSlices, stored.dump()}});
}

absl::StatusOr<NamedTensors> ReadOptimizerState(const std::string& directory,
                                                const std::vector<StateSlice>& wanted,
                                                const std::vector<std::string>& trained) {
  TANDEM_ASSIGN_OR_RETURN(const StoredState stored, Open(directory));
  const std::set<std::string> known(trained.begin(), trained.end());
  for (const auto& [name, parts] : stored.parts) {
    if (!known.contains(ParameterOf(name))) {
      return absl::DataLossError(absl::StrCat("optimizer state: tensor '", name,
                                              "' belongs to no parameter that trains here"));
    }
  }
  NamedTensors state;
  for (const StateSlice& slice : wanted) {
    for (const char* moment : {training::kFirstMoment, training::kSecondMoment}) {
      const std::string name = slice.parameter + moment;
      const auto found = stored.parts.find(name);
      if (found == stored.parts.end()) continue;  // the optimizer names what it lacks
      TANDEM_ASSIGN_OR_RETURN(at::Tensor values, Assemble(name, slice, found->second));
      state.emplace_back(name, std::move(values));
    }
  }
  if (stored.steps.defined()) state.emplace_back(training::kOptimizerSteps, stored.steps.clone());
  return state;
}

}  // namespace tandem::parallel
