#include "common/model/config/lora.h"

#include <algorithm>
#include <set>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "common/base/errors/error.h"
#include "common/base/errors/status_macros.h"
#include "common/model/config/freeze.h"

namespace tandem {
namespace {

// Returns the last part of a map's name, the part that PEFT calls a module; empty for a parameter
// that is no matrix of a decoder layer.
absl::string_view ModuleOf(const ParameterSpec& spec) {
  absl::string_view name = spec.name;
  if (spec.shape.size() != 2 || !absl::StartsWith(name, "model.layers.") ||
      !absl::ConsumeSuffix(&name, ".weight")) {
    return {};
  }
  return name.substr(name.rfind('.') + 1);
}

// Whether the map can have an adapter. Routers choose experts; kv_b_proj is multiplied by parts.
bool CanAdapt(const ParameterSpec& spec) {
  const absl::string_view module = ModuleOf(spec);
  return !module.empty() && spec.packs() && module != "gate" && module != "shared_expert_gate";
}

absl::Status CheckOptions(const LoraOptions& options) {
  if (options.rank < 1) return InvalidField("lora.rank", "must be at least 1");
  if (!(options.alpha > 0)) return InvalidField("lora.alpha", "must be above 0");
  if (options.target_modules.empty()) {
    return InvalidField("lora.target_modules", "must not be empty");
  }
  return absl::OkStatus();
}

// Returns the modules that are adapted.
absl::StatusOr<std::set<absl::string_view>> Targets(const std::vector<ParameterSpec>& specs,
                                                    const LoraOptions& options) {
  std::set<absl::string_view> adaptable, others;
  for (const ParameterSpec& spec : specs) {
    (CanAdapt(spec) ? adaptable : others).insert(ModuleOf(spec));
  }
  std::set<absl::string_view> targets;
  for (size_t i = 0; i < options.target_modules.size(); ++i) {
    const std::string& module = options.target_modules[i];
    const std::string field = absl::StrCat("lora.target_modules[", i, "]");
    if (module == kAllLinear) {
      targets.insert(adaptable.begin(), adaptable.end());
    } else if (adaptable.contains(module)) {
      targets.insert(module);
    } else if (!module.empty() && others.contains(module)) {
      return FieldError(absl::StatusCode::kUnimplemented, field,
                        absl::StrCat("'", module, "' cannot have an adapter; these can: ",
                                     absl::StrJoin(adaptable, ", ")));
    } else {
      return InvalidField(
          field, absl::StrCat("no linear map of the model's layers is called '", module,
                              "'; these can have an adapter: ", absl::StrJoin(adaptable, ", ")));
    }
  }
  return targets;
}

}  // namespace

std::string LoraOptions::Text() const {
  return enabled() ? absl::StrCat("rank ", rank, ", alpha ", alpha) : "";
}

absl::StatusOr<std::vector<ParameterSpec>> WithAdapters(std::vector<ParameterSpec> specs,
                                                        const LoraOptions& options) {
  TANDEM_RETURN_IF_ERROR(CheckOptions(options));
  TANDEM_ASSIGN_OR_RETURN(const std::set<absl::string_view> targets, Targets(specs, options));
  std::vector<ParameterSpec> with;
  for (const ParameterSpec& spec : specs) {
    if (CanAdapt(spec) && targets.contains(ModuleOf(spec))) {
      const absl::string_view map = absl::StripSuffix(spec.name, ".weight");
      // A map that is cut by its output, axis 0, cuts B; one that is cut by its input cuts A.
      const auto add = [&](absl::string_view matrix, std::vector<int64_t> shape, Init init,
                           int64_t axis) {
        with.push_back({.name = absl::StrCat(map, matrix),
                        .shape = std::move(shape),
                        .init = init,
                        .shard_axis = spec.shard_axis == axis ? spec.shard_axis : std::nullopt,
                        .block = spec.block,
                        .stays_dense = true,
                        .adapts = true,
                        .expert = spec.expert});
      };
      add(".lora_A.weight", {options.rank, spec.shape[1]}, Init::kLoraA, /*axis=*/1);
      add(".lora_B.weight", {spec.shape[0], options.rank}, Init::kZeros, /*axis=*/0);
    }
    with.push_back(spec);
  }
  return with;
}

absl::StatusOr<std::vector<ParameterSpec>> ModelParameters(const ModelConfig& config,
                                                           const HeadOptions& head,
                                                           const LoraOptions& options) {
  TANDEM_ASSIGN_OR_RETURN(std::vector<ParameterSpec> specs, ModelParameters(config, head));
  if (!options.enabled()) return specs;
  return WithAdapters(std::move(specs), options);
}

absl::string_view AdaptedMap(absl::string_view parameter) {
  if (absl::ConsumeSuffix(&parameter, ".lora_A.weight") ||
      absl::ConsumeSuffix(&parameter, ".lora_B.weight")) {
    return parameter;
  }
  return {};
}

absl::StatusOr<std::vector<bool>> TrainableParameters(const std::vector<ParameterSpec>& specs,
                                                      const std::vector<std::string>& freeze,
                                                      const LoraOptions& options) {
  if (!options.enabled()) return TrainableParameters(specs, freeze);
  if (!freeze.empty()) {
    return InvalidField("freeze", "has no effect with lora: only adapters train");
  }
  std::vector<bool> trainable;
  for (const ParameterSpec& spec : specs) {
    trainable.push_back(spec.adapts || spec.name == kValueHeadWeight ||
                        spec.name == kValueHeadBias);
  }
  return trainable;
}

}  // namespace tandem
