#include "common/parallel/optimizer/optimizer_state.h"

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
#include "common/base/errors/error.h"
#include "common/base/errors/status_macros.h"
#include "common/base/files/paths/confined_folder.h"
#include "common/optim/adamw.h"
#include "common/parallel/held_values.h"
#include "common/tensor/aten/aten_bytes.h"
#include "common/tensor/safetensors/safetensors.h"

namespace tandem::parallel {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr char kWholeFile[] = "optimizer.safetensors";
constexpr char kSlices[] = "slices";

// A range of a state tensor as a file holds it.
struct StoredRange {
  ParameterRange range;
  at::Tensor values;  // [range.numel], in the file's memory
};

struct StoredState {
  std::vector<std::unique_ptr<SafetensorsFile>> files;
  std::map<std::string, std::vector<StoredRange>> ranges;  // by tensor
  at::Tensor steps;
};

bool IsInteger(const json& object, const char* key) {
  return object.contains(key) && object[key].is_number_integer();
}

// Whether `shard` is {"axis": 1, "index": 0, "count": 2}, and fits a parameter of that shape.
bool IsShard(const json& shard, const std::vector<int64_t>& shape) {
  if (!shard.is_object() || !IsInteger(shard, "axis") || !IsInteger(shard, "index") ||
      !IsInteger(shard, "count")) {
    return false;
  }
  const auto axis = shard["axis"].get<int64_t>(), index = shard["index"].get<int64_t>(),
             count = shard["count"].get<int64_t>();
  return axis >= 0 && axis < static_cast<int64_t>(shape.size()) && index >= 0 && index < count &&
         count <= shape[static_cast<size_t>(axis)];
}

bool IsSlice(const json& slice) {
  return slice.is_object() && slice.contains("shape") && slice["shape"].is_array() &&
         std::all_of(slice["shape"].begin(), slice["shape"].end(),
                     [](const json& size) { return size.is_number_integer(); }) &&
         IsInteger(slice, "offset") &&
         (!slice.contains("shard") ||
          IsShard(slice["shard"], slice["shape"].get<std::vector<int64_t>>()));
}

// Returns {"<parameter>": {"shape": [...], "offset": 0, "shard": {...}}}; "shard" is there for
// tensor-parallel parameters only. Empty where the file holds whole tensors.
absl::StatusOr<json> ReadSlices(const SafetensorsFile& file) {
  const auto found = file.metadata().find(kSlices);
  if (found == file.metadata().end()) return json::object();
  absl::StatusOr<json> slices = ParseBoundedJson(found->second, file.path());
  if (!slices.ok() || !slices->is_object() ||
      !std::all_of(slices->begin(), slices->end(), IsSlice)) {
    return absl::DataLossError(
        absl::StrCat(file.path(), ": metadata 'slices' does not say which values the file holds"));
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
    StoredRange stored = {.range = {.parameter = ParameterOfState(view.name),
                                    .shape = view.shape,
                                    .numel = values.numel()},
                          .values = values.reshape({-1})};
    if (const auto found = slices.find(stored.range.parameter); found != slices.end()) {
      stored.range.shape = found->at("shape").get<std::vector<int64_t>>();
      stored.range.offset = found->at("offset").get<int64_t>();
      if (const auto shard = found->find("shard"); shard != found->end()) {
        stored.range.shard = {.axis = shard->at("axis").get<int64_t>(),
                              .index = shard->at("index").get<int64_t>(),
                              .count = shard->at("count").get<int64_t>()};
      }
    }
    state.ranges[view.name].push_back(std::move(stored));
  }
  state.files.push_back(std::move(file));
  return absl::OkStatus();
}

absl::StatusOr<StoredState> Open(const std::string& directory) {
  StoredState state;
  std::set<std::string> names;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(SystemPath(directory), error)) {
    const std::string name = entry.path().filename();
    const bool is_state = name == kWholeFile || (absl::StartsWith(name, "optimizer-") &&
                                                 absl::EndsWith(name, ".safetensors"));
    if (is_state) names.insert(name);
  }
  if (names.empty()) {
    return FieldError(
        absl::StatusCode::kFailedPrecondition, "path",
        absl::StrCat(directory, " has no optimizer state: it was written by a trainer with ",
                     "speculator.freeze_base_model. Its files can be used as `model`"));
  }
  for (const std::string& name : names) {
    TANDEM_RETURN_IF_ERROR(AddFile(absl::StrCat(directory, "/", name), state));
  }
  return state;
}

// Copies the values that both ranges have; returns how many those are.
int64_t CopyCommon(const std::vector<Run>& to_runs, const at::Tensor& to,
                   const std::vector<Run>& from_runs, const at::Tensor& from) {
  int64_t copied = 0;
  auto source = from_runs.begin();
  for (auto target = to_runs.begin(); target != to_runs.end() && source != from_runs.end();) {
    const int64_t target_end = target->in_whole + target->numel;
    const int64_t source_end = source->in_whole + source->numel;
    const int64_t begin = std::max(target->in_whole, source->in_whole);
    const int64_t numel = std::min(target_end, source_end) - begin;
    if (numel > 0) {
      CopyMapped(to.narrow(0, target->in_range + begin - target->in_whole, numel),
                 from.narrow(0, source->in_range + begin - source->in_whole, numel));
      copied += numel;
    }
    if (target_end <= source_end) {
      ++target;
    } else {
      ++source;
    }
  }
  return copied;
}

// Returns the values of `range`, from whichever stored ranges hold them.
absl::StatusOr<at::Tensor> Assemble(const std::string& name, const ParameterRange& range,
                                    const std::vector<StoredRange>& stored_ranges) {
  const std::vector<Run> wanted = RunsOf(range);
  at::Tensor values = at::empty({range.numel}, stored_ranges[0].values.options());
  int64_t found = 0;
  for (const StoredRange& stored : stored_ranges) {
    if (stored.range.shape != range.shape) {
      return absl::DataLossError(
          absl::StrCat("optimizer state: tensor '", name, "' has another shape"));
    }
    found += CopyCommon(wanted, values, RunsOf(stored.range), stored.values);
  }
  if (found != range.numel) {
    return absl::DataLossError(absl::StrCat("optimizer state: tensor '", name, "' has ", found,
                                            " of ", range.numel, " values"));
  }
  return values;
}

}  // namespace

std::string ParameterOfState(absl::string_view tensor) {
  return std::string(tensor.substr(0, tensor.rfind('.')));
}

absl::Status WriteOptimizerState(const std::string& directory, int rank, int ranks,
                                 const std::vector<ParameterRange>& ranges,
                                 const NamedTensors& state) {
  if (ranks == 1) return WriteNamedTensors(absl::StrCat(directory, "/", kWholeFile), state);
  json slices = json::object();
  for (const ParameterRange& range : ranges) {
    json& entry = slices[range.parameter];
    entry = {{"shape", range.shape}, {"offset", range.offset}};
    if (range.shard.count == 1) continue;
    entry["shard"] = {
        {"axis", range.shard.axis}, {"index", range.shard.index}, {"count", range.shard.count}};
  }
  return WriteNamedTensors(
      absl::StrFormat("%s/optimizer-%05d-of-%05d.safetensors", directory, rank, ranks), state,
      std::nullopt, {{kSlices, slices.dump()}});
}

absl::StatusOr<NamedTensors> ReadOptimizerState(const std::string& directory,
                                                const std::vector<ParameterRange>& wanted,
                                                const std::vector<std::string>& trained) {
  TANDEM_ASSIGN_OR_RETURN(const StoredState stored, Open(directory));
  const std::set<std::string> known(trained.begin(), trained.end());
  for (const auto& [name, ranges] : stored.ranges) {
    if (!known.contains(ParameterOfState(name))) {
      return absl::DataLossError(absl::StrCat("optimizer state: tensor '", name,
                                              "' belongs to no parameter that trains here"));
    }
  }
  NamedTensors state;
  for (const ParameterRange& range : wanted) {
    for (const char* moment : {training::kFirstMoment, training::kSecondMoment}) {
      const std::string name = range.parameter + moment;
      const auto found = stored.ranges.find(name);
      if (found == stored.ranges.end()) continue;  // the optimizer names what it lacks
      TANDEM_ASSIGN_OR_RETURN(at::Tensor values, Assemble(name, range, found->second));
      state.emplace_back(name, std::move(values));
    }
  }
  if (stored.steps.defined()) state.emplace_back(training::kOptimizerSteps, stored.steps.clone());
  return state;
}

}  // namespace tandem::parallel
