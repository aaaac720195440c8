#include "common/model/config/model_config.h"

#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "common/base/bounded_json.h"
#include "common/base/errors/error.h"
#include "common/base/errors/status_macros.h"
#include "common/base/files/atomic_file.h"
#include "common/model/config/config_fields.h"
#include "common/model/family.h"

namespace tandem {
namespace {

using nlohmann::json;

constexpr size_t kMaxConfigBytes = 16'000'000;  // classification configs list thousands of labels

}  // namespace

absl::StatusOr<ModelConfig> ParseModelConfig(absl::string_view text,
                                             absl::string_view generation_text) {
  ModelConfig config;
  config.raw_json = std::string(text);
  TANDEM_ASSIGN_OR_RETURN(const json document, ParseBoundedJson(text, "config.json"));
  if (!document.is_object()) return InvalidField("config.json", "must be an object");
  const ConfigFields fields(document, "config.json");
  TANDEM_ASSIGN_OR_RETURN(config.model_type, fields.String("model_type", ""));
  if (config.model_type.empty()) return InvalidField(fields.Path("model_type"), "is missing");
  // A model of another family is named as such before its sizes are looked for: another family may
  // call them otherwise.
  TANDEM_ASSIGN_OR_RETURN(const Family* family, FindFamily(config.model_type));
  TANDEM_RETURN_IF_ERROR(family->ReadConfig(fields, config));

  std::set<int64_t> eos;
  const json& of_text = config.text_path.empty() ? document : document["text_config"];
  const std::vector<int64_t> of_family = std::move(config.eos_token_ids);
  if (of_text.contains("eos_token_id")) eos.insert(of_family.begin(), of_family.end());
  TANDEM_RETURN_IF_ERROR(fields.AppendIds("eos_token_id", eos));
  if (!generation_text.empty()) {
    TANDEM_ASSIGN_OR_RETURN(const json generation,
                            ParseBoundedJson(generation_text, "generation_config.json"));
    if (!generation.is_object()) return InvalidField("generation_config.json", "must be an object");
    TANDEM_RETURN_IF_ERROR(
        ConfigFields(generation, "generation_config.json").AppendIds("eos_token_id", eos));
  }
  // Where no file says it, it is the class's.
  if (eos.empty() && generation_text.empty()) eos.insert(of_family.begin(), of_family.end());
  config.eos_token_ids.assign(eos.begin(), eos.end());
  return config;
}

absl::StatusOr<ModelConfig> LoadModelConfig(const std::string& directory) {
  namespace fs = std::filesystem;
  TANDEM_ASSIGN_OR_RETURN(const std::string text,
                          ReadFile(fs::path(directory) / "config.json", kMaxConfigBytes));
  std::string generation;
  const fs::path generation_path = fs::path(directory) / "generation_config.json";
  std::error_code ignored;
  if (fs::exists(generation_path, ignored)) {
    TANDEM_ASSIGN_OR_RETURN(generation, ReadFile(generation_path, kMaxConfigBytes));
  }
  return ParseModelConfig(text, generation);
}

}  // namespace tandem
