#include "common/model/loading/peft_files.h"

#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/bounded_json.h"
#include "common/base/errors/error.h"
#include "common/base/errors/status_macros.h"
#include "common/base/files/atomic_file.h"
#include "common/base/logging.h"
#include "common/model/config/config_fields.h"

namespace tandem {
namespace {

using nlohmann::json;

// Initial values of the adapters that leave the base model as its files have it. Others (PiSSA,
// OLoRA, CorDA, LoftQ, LoRA-GA) subtract them from its weights, or train one of the two matrices.
absl::Status CheckInitialValues(const ConfigFields& fields) {
  const json* const value = fields.Find("init_lora_weights");
  if (value == nullptr || value->is_null() || value->is_boolean()) return absl::OkStatus();
  for (const char* name : {"gaussian", "orthogonal", "eva"}) {
    if (*value == name) return absl::OkStatus();
  }
  return fields.NotSupported("init_lora_weights", value->dump());
}

// Refuses what changes the formula of the adapters, or trains more than them.
absl::Status CheckPlainLora(const ConfigFields& fields) {
  TANDEM_ASSIGN_OR_RETURN(const std::string type, fields.String("peft_type", ""));
  if (type != "LORA") return fields.NotSupported("peft_type", absl::StrCat("\"", type, "\""));
  TANDEM_ASSIGN_OR_RETURN(const std::string bias, fields.String("bias", "none"));
  if (bias != "none") return fields.NotSupported("bias", absl::StrCat("\"", bias, "\""));
  for (const char* key : {"use_rslora", "use_dora", "use_qalora", "fan_in_fan_out", "lora_bias"}) {
    TANDEM_ASSIGN_OR_RETURN(const bool on, fields.Bool(key, false));
    if (on) return fields.NotSupported(key, key);
  }
  for (const char* key : {"rank_pattern", "alpha_pattern", "layers_to_transform",
                          "layer_replication", "target_parameters", "exclude_modules",
                          "trainable_token_indices", "alora_invocation_tokens", "arrow_config",
                          "kasa_config", "monteclora_config", "use_bdlora"}) {
    const json* const value = fields.Find(key);
    if (value != nullptr && !value->empty()) return fields.NotSupported(key, key);
  }
  return CheckInitialValues(fields);
}

absl::StatusOr<std::vector<std::string>> TargetModules(const ConfigFields& fields) {
  const json* const value = fields.Find("target_modules");
  std::vector<std::string> modules;
  if (value != nullptr && value->is_string() && *value == kAllLinear) return {{kAllLinear}};
  if (value == nullptr || !value->is_array()) {
    return fields.NotSupported("target_modules", "anything but a list of names");
  }
  for (const json& module : *value) {
    if (!module.is_string()) {
      return InvalidField(fields.Path("target_modules"), "must be a list of names");
    }
    modules.push_back(module.get<std::string>());
  }
  std::ranges::sort(modules);
  return modules;
}

absl::StatusOr<json> ReadAdapterConfig(const std::string& directory) {
  const std::string file = absl::StrCat(directory, "/", kAdapterConfigFile);
  const absl::StatusOr<std::string> text = ReadFile(file);
  if (!text.ok()) return PrependFieldPath("lora.path", text.status());
  absl::StatusOr<json> parsed = ParseBoundedJson(*text, file);
  if (!parsed.ok()) return PrependFieldPath("lora.path", parsed.status());
  return parsed;
}

}  // namespace

absl::StatusOr<LoraOptions> ResolveLora(const LoraOptions& options) {
  if (options.path.empty()) return options;
  TANDEM_ASSIGN_OR_RETURN(const json config, ReadAdapterConfig(options.path));
  const ConfigFields fields(config, kAdapterConfigFile);
  TANDEM_RETURN_IF_ERROR(CheckPlainLora(fields));
  LoraOptions resolved = options;
  TANDEM_ASSIGN_OR_RETURN(resolved.rank, fields.Size("r"));
  TANDEM_ASSIGN_OR_RETURN(resolved.alpha, fields.Positive("lora_alpha"));
  TANDEM_ASSIGN_OR_RETURN(resolved.target_modules, TargetModules(fields));
  if (options.rank != 0 && options.rank != resolved.rank) {
    return InvalidField("lora.rank", absl::StrCat("is ", options.rank, ", but the adapter in ",
                                                  options.path, " has ", resolved.rank));
  }
  if (options.alpha != 0 && options.alpha != resolved.alpha) {
    return InvalidField("lora.alpha", absl::StrCat("is ", options.alpha, ", but the adapter in ",
                                                   options.path, " has ", resolved.alpha));
  }
  return resolved;
}

absl::Status NoteDropout(const LoraOptions& options) {
  if (options.path.empty()) return absl::OkStatus();
  TANDEM_ASSIGN_OR_RETURN(const json config, ReadAdapterConfig(options.path));
  const ConfigFields fields(config, kAdapterConfigFile);
  const json* const dropout = fields.Find("lora_dropout");
  if (dropout == nullptr || *dropout == 0) return absl::OkStatus();
  if (!dropout->is_number()) return InvalidField(fields.Path("lora_dropout"), "must be a number");
  Log(LogLevel::kWarning, "lora_dropout_not_applied",
      {{"path", options.path}, {"lora_dropout", dropout->get<double>()}});
  return absl::OkStatus();
}

absl::Status WriteAdapterConfig(const std::string& directory, const LoraOptions& options,
                                const std::vector<ParameterSpec>& specs,
                                absl::string_view base_model) {
  std::set<std::string> modules;
  bool has_value_head = false;
  for (const ParameterSpec& spec : specs) {
    const absl::string_view map = AdaptedMap(spec.name);
    if (!map.empty()) modules.emplace(map.substr(map.rfind('.') + 1));
    has_value_head = has_value_head || spec.name == kValueHeadWeight;
  }
  const json config = {{"peft_type", "LORA"},
                       {"task_type", has_value_head ? "TOKEN_CLS" : "CAUSAL_LM"},
                       {"base_model_name_or_path", base_model},
                       {"r", options.rank},
                       {"lora_alpha", options.alpha},
                       {"lora_dropout", 0.0},
                       {"target_modules", modules},
                       {"modules_to_save", has_value_head ? json({"score"}) : json()},
                       {"bias", "none"},
                       {"fan_in_fan_out", false},
                       {"init_lora_weights", true},
                       {"use_rslora", false},
                       {"use_dora", false},
                       {"inference_mode", true}};
  return WriteFileDurably(
      absl::StrCat(directory, "/", kAdapterConfigFile),
      config.dump(2, ' ', /*ensure_ascii=*/true, json::error_handler_t::replace) + "\n");
}

}  // namespace tandem
