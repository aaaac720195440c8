#include "common/model/model_config.h"

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "common/base/atomic_file.h"
#include "common/base/bounded_json.h"
#include "common/base/error.h"
#include "common/base/status_macros.h"
#include "common/model/family_registry.h"

namespace tandem {
namespace {

using nlohmann::json;

constexpr size_t kMaxConfigBytes = 16'000'000;  // classification configs list thousands of labels
constexpr int64_t kMaxSize = int64_t{1} << 31;

std::string Text(absl::string_view text) { return std::string(text); }

// Typed access to one object, with errors that name the field's full path. `null` is "not given",
// as in Python's configs.
class Fields {
 public:
  Fields(const json& object, std::string path) : object_(object), path_(std::move(path)) {}

  std::string Path(absl::string_view key) const { return absl::StrCat(path_, ".", key); }

  const json* Find(absl::string_view key) const {
    const auto found = object_.find(Text(key));
    return found == object_.end() || found->is_null() ? nullptr : &*found;
  }

  absl::StatusOr<int64_t> Size(absl::string_view key, std::optional<int64_t> fallback = {}) const {
    const json* value = Find(key);
    if (value == nullptr) {
      if (fallback.has_value()) return *fallback;
      return InvalidField(Path(key), "is missing");
    }
    if (!value->is_number_integer() || *value <= 0 || *value > kMaxSize) {
      return InvalidField(Path(key), "must be a positive integer");
    }
    return value->get<int64_t>();
  }

  absl::StatusOr<double> Positive(absl::string_view key, std::optional<double> fallback) const {
    const json* value = Find(key);
    if (value == nullptr) {
      if (fallback.has_value()) return *fallback;
      return InvalidField(Path(key), "is missing");
    }
    if (!value->is_number() || !(value->get<double>() > 0)) {
      return InvalidField(Path(key), "must be a positive number");
    }
    return value->get<double>();
  }

  absl::StatusOr<std::optional<double>> MaybePositive(absl::string_view key) const {
    if (Find(key) == nullptr) return std::optional<double>();
    TANDEM_ASSIGN_OR_RETURN(const double value, Positive(key, {}));
    return std::optional<double>(value);
  }

  absl::StatusOr<bool> Bool(absl::string_view key, bool fallback) const {
    const json* value = Find(key);
    if (value == nullptr) return fallback;
    if (!value->is_boolean()) return InvalidField(Path(key), "must be true or false");
    return value->get<bool>();
  }

  absl::StatusOr<std::string> String(absl::string_view key, absl::string_view fallback) const {
    const json* value = Find(key);
    if (value == nullptr) return Text(fallback);
    if (!value->is_string()) return InvalidField(Path(key), "must be text");
    return value->get<std::string>();
  }

  // One id, a list of ids, or nothing.
  absl::Status AppendIds(absl::string_view key, std::set<int64_t>& ids) const {
    const json* value = Find(key);
    if (value == nullptr) return absl::OkStatus();
    const json list = value->is_array() ? *value : json::array({*value});
    for (const json& id : list) {
      if (!id.is_number_integer() || id < 0) {
        return InvalidField(Path(key), "must be a token id or a list of them");
      }
      ids.insert(id.get<int64_t>());
    }
    return absl::OkStatus();
  }

  absl::StatusOr<std::optional<Fields>> Object(absl::string_view key) const {
    const json* value = Find(key);
    if (value == nullptr) return std::optional<Fields>();
    if (!value->is_object()) return InvalidField(Path(key), "must be an object");
    return std::optional<Fields>(Fields(*value, Path(key)));
  }

 private:
  const json& object_;
  std::string path_;
};

absl::Status NotYet(absl::string_view path, absl::string_view what) {
  return FieldError(absl::StatusCode::kUnimplemented, path,
                    absl::StrCat(what, " is not supported"));
}

absl::Status ParseRopeScaling(const Fields& fields, int64_t max_position_embeddings,
                              RopeConfig& rope) {
  const char* type_key = fields.Find("rope_type") != nullptr ? "rope_type" : "type";
  TANDEM_ASSIGN_OR_RETURN(const std::string type, fields.String(type_key, "default"));
  TANDEM_ASSIGN_OR_RETURN(const double partial, fields.Positive("partial_rotary_factor", 1.0));
  if (partial != 1.0) return NotYet(fields.Path("partial_rotary_factor"), "partial rotary");
  if (type == "default") {
    rope.type = RopeConfig::Type::kDefault;
    return absl::OkStatus();
  }
  if (type == "linear") {
    rope.type = RopeConfig::Type::kLinear;
  } else if (type == "llama3") {
    rope.type = RopeConfig::Type::kLlama3;
  } else if (type == "yarn") {
    rope.type = RopeConfig::Type::kYarn;
  } else {
    return NotYet(fields.Path(type_key), absl::StrCat("rope type '", type, "'"));
  }
  std::optional<double> implied_factor;
  if (rope.type != RopeConfig::Type::kLinear) {
    TANDEM_ASSIGN_OR_RETURN(rope.original_max_position_embeddings,
                            fields.Positive("original_max_position_embeddings",
                                            static_cast<double>(max_position_embeddings)));
    if (rope.type == RopeConfig::Type::kYarn) {
      implied_factor = max_position_embeddings / rope.original_max_position_embeddings;
    }
  }
  TANDEM_ASSIGN_OR_RETURN(rope.factor, fields.Positive("factor", implied_factor));
  if (rope.type == RopeConfig::Type::kLlama3) {
    TANDEM_ASSIGN_OR_RETURN(rope.low_freq_factor, fields.Positive("low_freq_factor", {}));
    TANDEM_ASSIGN_OR_RETURN(rope.high_freq_factor, fields.Positive("high_freq_factor", {}));
    if (rope.high_freq_factor <= rope.low_freq_factor) {
      return InvalidField(fields.Path("high_freq_factor"), "must exceed low_freq_factor");
    }
  }
  if (rope.type == RopeConfig::Type::kYarn) {
    TANDEM_ASSIGN_OR_RETURN(rope.beta_fast, fields.Positive("beta_fast", 32.0));
    TANDEM_ASSIGN_OR_RETURN(rope.beta_slow, fields.Positive("beta_slow", 1.0));
    TANDEM_ASSIGN_OR_RETURN(rope.truncate, fields.Bool("truncate", true));
    TANDEM_ASSIGN_OR_RETURN(rope.attention_factor, fields.MaybePositive("attention_factor"));
    TANDEM_ASSIGN_OR_RETURN(rope.mscale, fields.MaybePositive("mscale"));
    TANDEM_ASSIGN_OR_RETURN(rope.mscale_all_dim, fields.MaybePositive("mscale_all_dim"));
  }
  return absl::OkStatus();
}

absl::Status ParseRope(const Fields& fields, ModelConfig& config) {
  TANDEM_ASSIGN_OR_RETURN(config.rope.theta, fields.Positive("rope_theta", 10000.0));
  for (const char* key : {"rope_scaling", "rope_parameters"}) {
    TANDEM_ASSIGN_OR_RETURN(const auto rope, fields.Object(key));
    if (!rope.has_value()) continue;
    TANDEM_ASSIGN_OR_RETURN(config.rope.theta, rope->Positive("rope_theta", config.rope.theta));
    TANDEM_RETURN_IF_ERROR(ParseRopeScaling(*rope, config.max_position_embeddings, config.rope));
  }
  return absl::OkStatus();
}

// Features that would change the numbers and that no family here has.
absl::Status RefuseUnsupported(const Fields& fields) {
  TANDEM_ASSIGN_OR_RETURN(const std::string act, fields.String("hidden_act", "silu"));
  if (act != "silu")
    return NotYet(fields.Path("hidden_act"), absl::StrCat("activation '", act, "'"));
  TANDEM_ASSIGN_OR_RETURN(const bool sliding, fields.Bool("use_sliding_window", false));
  if (sliding) return NotYet(fields.Path("use_sliding_window"), "sliding-window attention");
  if (const json* layers = fields.Find("layer_types"); layers != nullptr && layers->is_array()) {
    for (const json& layer : *layers) {
      if (layer != "full_attention") {
        return NotYet(fields.Path("layer_types"), absl::StrCat("layer type ", layer.dump()));
      }
    }
  }
  if (fields.Find("quantization_config") != nullptr) {
    return NotYet(fields.Path("quantization_config"), "a quantised checkpoint");
  }
  TANDEM_ASSIGN_OR_RETURN(const double partial, fields.Positive("partial_rotary_factor", 1.0));
  if (partial != 1.0) return NotYet(fields.Path("partial_rotary_factor"), "partial rotary");
  return absl::OkStatus();
}

absl::Status ParseArchitecture(const Fields& fields, ModelConfig& config) {
  TANDEM_ASSIGN_OR_RETURN(config.model_type, fields.String("model_type", ""));
  if (config.model_type.empty()) return InvalidField(fields.Path("model_type"), "is missing");
  // Before the sizes: other families give them other names.
  TANDEM_RETURN_IF_ERROR(FindFamily(config.model_type).status());
  TANDEM_ASSIGN_OR_RETURN(config.vocab_size, fields.Size("vocab_size"));
  TANDEM_ASSIGN_OR_RETURN(config.hidden_size, fields.Size("hidden_size"));
  TANDEM_ASSIGN_OR_RETURN(config.intermediate_size, fields.Size("intermediate_size"));
  TANDEM_ASSIGN_OR_RETURN(config.num_hidden_layers, fields.Size("num_hidden_layers"));
  TANDEM_ASSIGN_OR_RETURN(config.num_attention_heads, fields.Size("num_attention_heads"));
  TANDEM_ASSIGN_OR_RETURN(config.num_key_value_heads,
                          fields.Size("num_key_value_heads", config.num_attention_heads));
  if (config.num_attention_heads % config.num_key_value_heads != 0) {
    return InvalidField(
        fields.Path("num_key_value_heads"),
        absl::StrCat("must divide num_attention_heads (", config.num_attention_heads, ")"));
  }
  if (fields.Find("head_dim") == nullptr && config.hidden_size % config.num_attention_heads != 0) {
    return InvalidField(fields.Path("hidden_size"),
                        "must be a multiple of num_attention_heads when head_dim is not given");
  }
  TANDEM_ASSIGN_OR_RETURN(
      config.head_dim,
      fields.Size("head_dim",
                  std::max<int64_t>(1, config.hidden_size / config.num_attention_heads)));
  if (config.head_dim % 2 != 0) {
    return InvalidField(fields.Path("head_dim"), "must be even for rotary embeddings");
  }
  TANDEM_ASSIGN_OR_RETURN(config.max_position_embeddings,
                          fields.Size("max_position_embeddings", 2048));
  TANDEM_ASSIGN_OR_RETURN(config.rms_norm_eps, fields.Positive("rms_norm_eps", 1e-6));
  TANDEM_ASSIGN_OR_RETURN(config.initializer_range, fields.Positive("initializer_range", 0.02));
  TANDEM_ASSIGN_OR_RETURN(config.tie_word_embeddings, fields.Bool("tie_word_embeddings", false));
  TANDEM_ASSIGN_OR_RETURN(config.attention_bias, fields.Bool("attention_bias", false));
  TANDEM_ASSIGN_OR_RETURN(config.mlp_bias, fields.Bool("mlp_bias", false));
  return ParseRope(fields, config);
}

}  // namespace

absl::StatusOr<ModelConfig> ParseModelConfig(absl::string_view text,
                                             absl::string_view generation_text) {
  ModelConfig config;
  config.raw_json = Text(text);
  TANDEM_ASSIGN_OR_RETURN(const json document, ParseBoundedJson(text, "config.json"));
  if (!document.is_object()) return InvalidField("config.json", "must be an object");
  const Fields fields(document, "config.json");
  TANDEM_RETURN_IF_ERROR(ParseArchitecture(fields, config));
  TANDEM_RETURN_IF_ERROR(RefuseUnsupported(fields));

  std::set<int64_t> eos;
  TANDEM_RETURN_IF_ERROR(fields.AppendIds("eos_token_id", eos));
  if (!generation_text.empty()) {
    TANDEM_ASSIGN_OR_RETURN(const json generation,
                            ParseBoundedJson(generation_text, "generation_config.json"));
    if (!generation.is_object()) return InvalidField("generation_config.json", "must be an object");
    TANDEM_RETURN_IF_ERROR(
        Fields(generation, "generation_config.json").AppendIds("eos_token_id", eos));
  }
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
