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
  StateSlice slice;
  at::Tensor values;  // [slice.numel], in the file's memory
};

struct StoredState {
  std::vector<std::unique_ptr<SafetensorsFile>> files;
  std::map<std::string, std::vector<StoredPart>> parts;  // by tensor
  at::Tensor steps;
};

bool IsInteger(const json& object, const char* key) {
  return object.contains(key) && object[key].is_number_integer();
}

// {"axis": 1, "index": 0, "count": 2} of a parameter of that shape.
bool IsShard(const json& shard, const std::vector<int64_t>& shape) {
  if (!shard.is_object() || !IsInteger(shard, "axis") || !IsInteger(shard, "index") ||
      !IsInteger(shard, "count")) {
    return false;
  }
  const auto axis = shard["axis"].get<int64_t>(), index = shard["index"].get<int64_t>(),
             count = shard["count"].get<int64_t>();
  return axis >= 0 && axis < static_cast<int64_t>(shape.size()) && count >= 1 && index >= 0 &&
         index < count && shape[static_cast<size_t>(axis)] % count == 0;
}

bool IsSlice(const json& slice) {
  return slice.is_object() && slice.contains("shape") && slice["shape"].is_array() &&
         std::all_of(slice["shape"].begin(), slice["shape"].end(),
                     [](const json& size) { return size.is_number_integer(); }) &&
         IsInteger(slice, "offset") &&
         (!slice.contains("shard") ||
          IsShard(slice["shard"], slice["shape"].get<std::vector<int64_t>>()));
}

// {"<parameter>": {"shape": [...], "offset": 0, "shard": {...}}}, the shard only of parameters that
// are cut; empty where the file holds whole tensors.
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
    StoredPart part = {.slice = {.parameter = ParameterOfState(view.name),
                                 .shape = view.shape,
                                 .numel = values.numel()},
                       .values = values.reshape({-1})};
    if (const auto found = slices.find(part.slice.parameter); found != slices.end()) {
      part.slice.shape = found->at("shape").get<std::vector<int64_t>>();
      part.slice.offset = found->at("offset").get<int64_t>();
      if (const auto shard = found->find("shard"); shard != found->end()) {
        part.slice.shard = {.axis = shard->at("axis").get<int64_t>(),
                            .index = shard->at("index").get<int64_t>(),
                            .count = shard->at("count").get<int64_t>()};
      }
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

// Values of a slice that lie one after the other in the whole parameter as well.
struct Run {
  int64_t in_whole, in_slice, numel;
};

// In the order of both.
std::vector<Run> RunsOf(const StateSlice& slice) {
  // [outer, count, width]: a shard is one of the `count`.
  int64_t outer = 1, all = 1;
  for (size_t axis = 0; axis < slice.shape.size(); ++axis) {
    if (static_cast<int64_t>(axis) < slice.shard.axis) outer *= slice.shape[axis];
    all *= slice.shape[axis];
  }
  if (all == 0) return {};
  const int64_t whole_width = all / outer, width = whole_width / slice.shard.count;
  std::vector<Run> runs;
  const int64_t end = slice.offset + slice.numel;
  for (int64_t at = slice.offset; at < end;) {
    const int64_t row = at / width, numel = std::min(end, (row + 1) * width) - at;
    runs.push_back({.in_whole = row * whole_width + slice.shard.index * width + at % width,
                    .in_slice = at - slice.offset,
                    .numel = numel});
    at += numel;
  }
  return runs;
}

// Copies what `from` has of `to`; the number of values.
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
      to.narrow(0, target->in_slice + begin - target->in_whole, numel)
          .copy_(from.narrow(0, source->in_slice + begin - source->in_whole, numel));
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

// The wanted values, from whichever parts hold them.
absl::StatusOr<at::Tensor> Assemble(const std::string& name, const StateSlice& slice,
                                    const std::vector<StoredPart>& parts) {
  const std::vector<Run> wanted = RunsOf(slice);
  at::Tensor values = at::empty({slice.numel}, parts[0].values.options());
  int64_t found = 0;
  for (const StoredPart& part : parts) {
    if (part.slice.shape != slice.shape) {
      return absl::DataLossError(
          absl::StrCat("optimizer state: tensor '", name, "' has another shape"));
    }
    found += CopyCommon(wanted, values, RunsOf(part.slice), part.values);
  }
  if (found != slice.numel) {
    return absl::DataLossError(absl::StrCat("optimizer state: tensor '", name, "' has ", found,
                                            " of ", slice.numel, " values"));
  }
  return values;
}

}  // namespace

std::string ParameterOfState(absl::string_view tensor) {
  return std::string(tensor.substr(0, tensor.rfind('.')));
}

absl::Status WriteOptimizerState(const std::string& directory, int rank, int ranks,
                                 const std::vector<StateSlice>& slices, const NamedTensors& state) {
  if (ranks == 1) return WriteNamedTensors(absl::StrCat(directory, "/", kWholeFile), state);
  json stored = json::object();
  for (const StateSlice& slice : slices) {
    json& entry = stored[slice.parameter];
    entry = {{"shape", slice.shape}, {"offset", slice.offset}};
    if (slice.shard.count == 1) continue;
    entry["shard"] = {
        {"axis", slice.shard.axis}, {"index", slice.shard.index}, {"count", slice.shard.count}};
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
    if (!known.contains(ParameterOfState(name))) {
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
