#include "common/model/rope_config.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/status_macros.h"

namespace tandem {
namespace {

using Type = RopeConfig::Type;

constexpr const char* kFullAttention = "full_attention";
constexpr const char* kSlidingAttention = "sliding_attention";

// Sizes of the model that a rotation depends on.
struct RopeSizes {
  int64_t max_position_embeddings;
  // The length of pre-training: that of config.json itself comes before the inner object's.
  std::optional<double> original_max_position_embeddings;
  int64_t head_dim;
};

absl::StatusOr<Type> ReadType(const ConfigFields& fields) {
  const char* key = fields.Find("rope_type") != nullptr ? "rope_type" : "type";
  TANDEM_ASSIGN_OR_RETURN(const std::string type, fields.String(key, "default"));
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
  if (type == "longrope") return Type::kLongRope;
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
  TANDEM_ASSIGN_OR_RETURN(rope.truncate, fields.Bool("truncate", defaults.truncate));
  TANDEM_ASSIGN_OR_RETURN(rope.attention_factor, fields.MaybePositive("attention_factor"));
  TANDEM_ASSIGN_OR_RETURN(rope.mscale, fields.MaybePositive("mscale"));
  TANDEM_ASSIGN_OR_RETURN(rope.mscale_all_dim, fields.MaybePositive("mscale_all_dim"));
  return absl::OkStatus();
}

absl::Status ReadLongRope(const ConfigFields& fields, int64_t head_dim, RopeConfig& rope) {
  TANDEM_ASSIGN_OR_RETURN(rope.attention_factor, fields.MaybePositive("attention_factor"));
  TANDEM_ASSIGN_OR_RETURN(rope.frequency_divisors,
                          fields.PositiveList("short_factor", head_dim / 2));
  TANDEM_ASSIGN_OR_RETURN(const std::vector<double> of_long_sequences,
                          fields.PositiveList("long_factor", head_dim / 2));
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

absl::Status ReadRopeScaling(const ConfigFields& fields, const RopeSizes& sizes, RopeConfig& rope) {
  for (const char* layer_type : {kFullAttention, kSlidingAttention}) {
    if (fields.Find(layer_type) != nullptr) {
      return fields.NotSupported(layer_type, "a rotation for one type of layers");
    }
  }
  TANDEM_ASSIGN_OR_RETURN(const double partial, fields.Positive("partial_rotary_factor", 1.0));
  if (partial != 1.0) return fields.NotSupported("partial_rotary_factor", "partial rotary");
  TANDEM_ASSIGN_OR_RETURN(rope.mrope_section, ReadMropeSection(fields, sizes.head_dim));
  TANDEM_ASSIGN_OR_RETURN(rope.type, ReadType(fields));
  if (rope.type == Type::kDefault) return absl::OkStatus();
  std::optional<double> implied_factor;
  if (rope.type != Type::kLinear) {
    TANDEM_ASSIGN_OR_RETURN(rope.original_max_position_embeddings,
                            fields.Positive("original_max_position_embeddings",
                                            static_cast<double>(sizes.max_position_embeddings)));
    rope.original_max_position_embeddings =
        sizes.original_max_position_embeddings.value_or(rope.original_max_position_embeddings);
    if (rope.type != Type::kLlama3) {
      implied_factor = sizes.max_position_embeddings / rope.original_max_position_embeddings;
    }
  }
  TANDEM_ASSIGN_OR_RETURN(rope.factor, fields.Positive("factor", implied_factor));
  switch (rope.type) {
    case Type::kLlama3:
      return ReadLlama3(fields, rope);
    case Type::kYarn:
      return ReadYarn(fields, rope);
    case Type::kLongRope:
      return ReadLongRope(fields, sizes.head_dim, rope);
    case Type::kDefault:
    case Type::kLinear:
      break;
  }
  return absl::OkStatus();
}

absl::StatusOr<RopeSizes> ReadSizes(const ConfigFields& fields, int64_t max_position_embeddings,
                                    int64_t head_dim) {
  RopeSizes sizes = {.max_position_embeddings = max_position_embeddings,
                     .original_max_position_embeddings = {},
                     .head_dim = head_dim};
  TANDEM_ASSIGN_OR_RETURN(sizes.original_max_position_embeddings,
                          fields.MaybePositive("original_max_position_embeddings"));
  return sizes;
}

// Reads the object `key` of `fields` into `rope`, if it is there.
absl::Status ReadRopeObject(const ConfigFields& fields, absl::string_view key,
                            const RopeSizes& sizes, RopeConfig& rope) {
  TANDEM_ASSIGN_OR_RETURN(const auto object, fields.Object(key));
  if (!object.has_value()) return absl::OkStatus();
  TANDEM_ASSIGN_OR_RETURN(rope.theta, object->Positive("rope_theta", rope.theta));
  return ReadRopeScaling(*object, sizes, rope);
}

}  // namespace

absl::StatusOr<RopeConfig> ReadRopeConfig(const ConfigFields& fields,
                                          int64_t max_position_embeddings, int64_t head_dim) {
  RopeConfig rope;
  TANDEM_ASSIGN_OR_RETURN(rope.theta, fields.Positive("rope_theta", rope.theta));
  TANDEM_ASSIGN_OR_RETURN(const RopeSizes sizes,
                          ReadSizes(fields, max_position_embeddings, head_dim));
  for (const char* key : {"rope_scaling", "rope_parameters"}) {
    TANDEM_RETURN_IF_ERROR(ReadRopeObject(fields, key, sizes, rope));
  }
  return rope;
}

absl::StatusOr<LayerRopes> ReadLayerRopes(const ConfigFields& fields,
                                          int64_t max_position_embeddings, int64_t head_dim) {
  LayerRopes ropes;
  TANDEM_ASSIGN_OR_RETURN(ropes.full.theta, fields.Positive("rope_theta", 1e6));
  TANDEM_ASSIGN_OR_RETURN(ropes.sliding.theta, fields.Positive("rope_local_base_freq", 1e4));
  TANDEM_ASSIGN_OR_RETURN(const RopeSizes sizes,
                          ReadSizes(fields, max_position_embeddings, head_dim));
  TANDEM_RETURN_IF_ERROR(ReadRopeObject(fields, "rope_scaling", sizes, ropes.full));
  TANDEM_ASSIGN_OR_RETURN(const auto by_type, fields.Object("rope_parameters"));
  if (!by_type.has_value()) return ropes;
  for (const char* key : {"rope_type", "rope_theta"}) {
    if (by_type->Find(key) != nullptr) {
      return by_type->NotSupported(key, "one rotation for all types of layers");
    }
  }
  TANDEM_RETURN_IF_ERROR(ReadRopeObject(*by_type, kFullAttention, sizes, ropes.full));
  TANDEM_RETURN_IF_ERROR(ReadRopeObject(*by_type, kSlidingAttention, sizes, ropes.sliding));
  return ropes;
}

}  // namespace tandem
