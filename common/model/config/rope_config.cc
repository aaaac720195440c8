#include "common/model/config/rope_config.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/base/errors/error.h"
#include "common/base/errors/status_macros.h"
#include "common/model/config/config_keys.h"
#include "common/model/families/keys/family_keys.h"
#include "common/ops/rotary/rotary_growth.h"

namespace tandem {
namespace {

using nlohmann::json;
using Type = RopeConfig::Type;

constexpr const char* kFullAttention = "full_attention";
constexpr const char* kSlidingAttention = "sliding_attention";
constexpr const char* kPartialRotary = "partial_rotary_factor";
constexpr const char* kOriginalLength = "original_max_position_embeddings";

const char* TypeKey(const ConfigFields& rope) {
  return rope.Find("rope_type") != nullptr ? "rope_type" : "type";
}

absl::StatusOr<Type> ReadType(const ConfigFields& fields) {
  const char* const key = TypeKey(fields);
  TANDEM_ASSIGN_OR_RETURN(const std::string type, RopeType(fields));
  // The older name of a default rotation by three positions.
  if (type == "default" || (type == "mrope" && fields.Find("mrope_section") != nullptr)) {
    return Type::kDefault;
  }
  if (type == "dynamic") {
    // Without a factor `transformers` loads no such model.
    TANDEM_RETURN_IF_ERROR(fields.Positive("factor", {}).status());
    return Type::kDefault;
  }
  if (type == "linear") return Type::kLinear;
  if (type == "llama3") return Type::kLlama3;
  if (type == "yarn") return Type::kYarn;
  // Phi-3's older files call it "su".
  if (type == "longrope" || type == "su") return Type::kLongRope;
  return fields.NotSupported(key, absl::StrCat("rope type '", type, "'"));
}

absl::Status ReadLlama3(const ConfigFields& fields, RopeConfig& rope) {
  TANDEM_ASSIGN_OR_RETURN(rope.low_freq_factor, fields.Positive("low_freq_factor", {}));
  TANDEM_ASSIGN_OR_RETURN(rope.high_freq_factor, fields.Positive("high_freq_factor", {}));
  if (rope.high_freq_factor <= rope.low_freq_factor) {
    return InvalidField(fields.Path("high_freq_factor"), "must exceed low_freq_factor");
  }
  return absl::OkStatus();
}

absl::Status ReadYarn(const ConfigFields& fields, RopeConfig& rope) {
  const RopeConfig defaults;
  TANDEM_ASSIGN_OR_RETURN(rope.beta_fast, fields.Positive("beta_fast", defaults.beta_fast));
  TANDEM_ASSIGN_OR_RETURN(rope.beta_slow, fields.Positive("beta_slow", defaults.beta_slow));
  TANDEM_ASSIGN_OR_RETURN(rope.truncate, fields.Truth("truncate"));
  TANDEM_ASSIGN_OR_RETURN(rope.attention_factor, fields.MaybePositive("attention_factor"));
  TANDEM_ASSIGN_OR_RETURN(rope.mscale, fields.MaybePositive("mscale"));
  TANDEM_ASSIGN_OR_RETURN(rope.mscale_all_dim, fields.MaybePositive("mscale_all_dim"));
  return absl::OkStatus();
}

absl::Status ReadLongRope(const ConfigFields& fields, int64_t rotary_dim, RopeConfig& rope) {
  TANDEM_ASSIGN_OR_RETURN(rope.attention_factor, fields.MaybePositive("attention_factor"));
  TANDEM_ASSIGN_OR_RETURN(rope.frequency_divisors,
                          fields.PositiveList("short_factor", rotary_dim / 2));
  TANDEM_ASSIGN_OR_RETURN(const std::vector<double> of_long_sequences,
                          fields.PositiveList("long_factor", rotary_dim / 2));
  if (of_long_sequences != rope.frequency_divisors) {
    rope.longest_sequence = static_cast<int64_t>(rope.original_max_position_embeddings);
  }
  return absl::OkStatus();
}

// Returns the three counts of `mrope_section`; none without the key.
absl::StatusOr<std::vector<int64_t>> ReadMropeSection(const ConfigFields& fields,
                                                      int64_t head_dim) {
  std::vector<int64_t> sections;
  if (fields.Find("mrope_section") == nullptr) return sections;
  TANDEM_ASSIGN_OR_RETURN(const std::vector<double> counts,
                          fields.PositiveList("mrope_section", 3));
  int64_t sum = 0;
  for (const double count : counts) {
    if (count > head_dim || count != std::floor(count)) sum = -3 * head_dim;  // never the half
    sections.push_back(static_cast<int64_t>(std::min<double>(count, head_dim)));
    sum += sections.back();
  }
  if (sum == head_dim / 2) return sections;
  return InvalidField(
      fields.Path("mrope_section"),
      absl::StrCat("must be three integers whose sum is half a head, ", head_dim / 2));
}

// Reads how many of a head's columns are rotated into `rope`, if the key is there.
absl::Status ReadPartialRotary(const ConfigFields& fields, const RopeModel& model,
                               RopeConfig& rope) {
  TANDEM_ASSIGN_OR_RETURN(const auto factor, fields.MaybePositive(kPartialRotary));
  if (!factor.has_value()) return absl::OkStatus();
  rope.rotary_dim = std::nullopt;
  if (*factor == 1.0) return absl::OkStatus();
  if (!model.partial_rotary) return fields.NotSupported(kPartialRotary, "partial rotary");
  const double dim = std::floor(static_cast<double>(model.head_dim) * *factor);
  if (*factor > 1.0 || dim < 2 || std::fmod(dim, 2) != 0) {
    return InvalidField(fields.Path(kPartialRotary),
                        absl::StrCat("must leave an even number of columns of a head of ",
                                     model.head_dim, " to rotate, got ", dim));
  }
  rope.rotary_dim = static_cast<int64_t>(dim);
  return absl::OkStatus();
}

// `original_length` is what config.json itself says.
absl::Status ReadRopeScaling(const ConfigFields& fields, const RopeModel& model,
                             std::optional<double> original_length, RopeConfig& rope) {
  for (const char* layer_type : {kFullAttention, kSlidingAttention}) {
    if (fields.Find(layer_type) != nullptr) {
      return fields.NotSupported(layer_type, "a separate rotation for one layer type");
    }
  }
  TANDEM_RETURN_IF_ERROR(ReadPartialRotary(fields, model, rope));
  TANDEM_ASSIGN_OR_RETURN(rope.mrope_section, ReadMropeSection(fields, model.head_dim));
  TANDEM_ASSIGN_OR_RETURN(rope.type, ReadType(fields));
  if (rope.type == Type::kDefault) return absl::OkStatus();
  std::optional<double> implied_factor;
  if (rope.type != Type::kLinear) {
    TANDEM_ASSIGN_OR_RETURN(
        rope.original_max_position_embeddings,
        fields.Positive(kOriginalLength, static_cast<double>(model.max_position_embeddings)));
    rope.original_max_position_embeddings =
        original_length.value_or(rope.original_max_position_embeddings);
    if (rope.type != Type::kLlama3) {
      implied_factor = model.max_position_embeddings / rope.original_max_position_embeddings;
    }
  }
  TANDEM_ASSIGN_OR_RETURN(rope.factor, fields.Positive("factor", implied_factor));
  switch (rope.type) {
    case Type::kLlama3:
      return ReadLlama3(fields, rope);
    case Type::kYarn:
      return ReadYarn(fields, rope);
    case Type::kLongRope:
      return ReadLongRope(fields, rope.rotary_dim.value_or(model.head_dim), rope);
    case Type::kDefault:
    case Type::kLinear:
      break;
  }
  return absl::OkStatus();
}

// Reads an object of a rotation into `rope`, which has what it need not say.
absl::Status ReadRopeObject(const ConfigFields& object, const RopeModel& model,
                            std::optional<double> original_length, RopeConfig& rope) {
  TANDEM_ASSIGN_OR_RETURN(const json obeyed, ObeyedKeys(object, RopeKeys()));
  const ConfigFields fields(obeyed, object.path());
  TANDEM_ASSIGN_OR_RETURN(rope.theta, fields.Positive("rope_theta", rope.theta));
  return ReadRopeScaling(fields, model, original_length, rope);
}

// Reads the rotation of one type of layers.
absl::Status ReadLayerRope(const ConfigFields& object, const RopeModel& model, RopeConfig& rope) {
  // `transformers` looks for this key of YaRN beside the layers' objects alone.
  if (const json* const truncate = object.Find("truncate");
      truncate != nullptr && *truncate != true) {
    return object.NotSupported("truncate", "a value other than true for one layer type");
  }
  return ReadRopeObject(object, model, /*original_length=*/{}, rope);
}

// Returns the object of `rope_parameters` for a type of layers; an empty one if it has none.
absl::StatusOr<json> LayerObject(const std::optional<ConfigFields>& by_type, const char* type) {
  if (!by_type.has_value()) return json::object();
  TANDEM_ASSIGN_OR_RETURN(const auto object, by_type->Object(type));
  return object.has_value() ? object->object() : json::object();
}

}  // namespace

absl::StatusOr<std::optional<ConfigFields>> RopeObject(const ConfigFields& fields) {
  TANDEM_ASSIGN_OR_RETURN(const auto scaling, fields.Object("rope_scaling"));
  if (scaling.has_value() && !scaling->object().empty()) return scaling;
  return fields.Object("rope_parameters");
}

absl::StatusOr<std::string> RopeType(const ConfigFields& rope) {
  return rope.String(TypeKey(rope), "default");
}

absl::StatusOr<RopeConfig> ReadRopeConfig(const ConfigFields& fields, RopeModel model) {
  RopeConfig rope;
  TANDEM_ASSIGN_OR_RETURN(rope.theta, fields.Positive("rope_theta"));
  TANDEM_RETURN_IF_ERROR(ReadPartialRotary(fields, model, rope));
  TANDEM_ASSIGN_OR_RETURN(const auto original_length, fields.MaybePositive(kOriginalLength));
  TANDEM_ASSIGN_OR_RETURN(const auto object, RopeObject(fields));
  if (!object.has_value()) return rope;
  TANDEM_RETURN_IF_ERROR(ReadRopeObject(*object, model, original_length, rope));
  return rope;
}

absl::StatusOr<LayerRopes> ReadLayerRopes(const ConfigFields& fields, RopeModel model) {
  LayerRopes ropes;
  for (RopeConfig* rope : {&ropes.full, &ropes.sliding}) {
    TANDEM_RETURN_IF_ERROR(ReadPartialRotary(fields, model, *rope));
  }
  TANDEM_ASSIGN_OR_RETURN(ropes.full.theta, fields.Positive("rope_theta"));
  TANDEM_ASSIGN_OR_RETURN(ropes.sliding.theta, fields.Positive("rope_local_base_freq"));
  TANDEM_ASSIGN_OR_RETURN(const auto scaling, fields.Object("rope_scaling"));
  TANDEM_ASSIGN_OR_RETURN(const auto by_type, fields.Object("rope_parameters"));
  if (by_type.has_value()) {
    for (const auto& [key, value] : by_type->object().items()) {
      if (key == kFullAttention || key == kSlidingAttention) continue;
      return by_type->NotSupported(key, "a single rotation for all layer types");
    }
  }
  TANDEM_ASSIGN_OR_RETURN(const json sliding, LayerObject(by_type, kSlidingAttention));
  TANDEM_ASSIGN_OR_RETURN(json full, LayerObject(by_type, kFullAttention));
  // As Gemma3TextConfig puts the two together: without `rope_parameters` there is a `rope_type`,
  // which `type`, its older name in `rope_scaling`, does not replace.
  if (!by_type.has_value()) full["rope_type"] = "default";
  if (scaling.has_value()) full.update(scaling->object());
  const std::string in = by_type.has_value() ? by_type->path() + "." : fields.Path("rope_scaling");
  const ConfigFields full_fields(full, by_type.has_value() ? in + kFullAttention : in);
  TANDEM_RETURN_IF_ERROR(ReadLayerRope(full_fields, model, ropes.full));
  TANDEM_RETURN_IF_ERROR(
      ReadLayerRope(ConfigFields(sliding, in + kSlidingAttention), model, ropes.sliding));
  return ropes;
}

int64_t RotaryTableBytes(const ModelConfig& config, int64_t longest) {
  const int64_t limit = config.LongestSequence(std::numeric_limits<int64_t>::max());
  const int64_t end = std::min(longest, limit);
  // A cosine and a sine for each pair of dimensions.
  int64_t widths = config.rope.rotary_dim.value_or(config.head_dim);
  if (config.window_rope) widths += config.window_rope->rotary_dim.value_or(config.head_dim);
  return ops::RotaryTableLength(end - 1, end, limit) * widths * static_cast<int64_t>(sizeof(float));
}

}  // namespace tandem
