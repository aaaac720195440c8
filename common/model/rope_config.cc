#include "common/model/rope_config.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/status_macros.h"

namespace tandem {
namespace {

absl::Status ReadRopeScaling(const ConfigFields& fields, int64_t max_position_embeddings,
                             RopeConfig& rope) {
  const char* type_key = fields.Find("rope_type") != nullptr ? "rope_type" : "type";
  TANDEM_ASSIGN_OR_RETURN(const std::string type, fields.String(type_key, "default"));
  TANDEM_ASSIGN_OR_RETURN(const double partial, fields.Positive("partial_rotary_factor", 1.0));
  if (partial != 1.0) return fields.NotSupported("partial_rotary_factor", "partial rotary");
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
    return fields.NotSupported(type_key, absl::StrCat("rope type '", type, "'"));
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
    const RopeConfig defaults;
    TANDEM_ASSIGN_OR_RETURN(rope.beta_fast, fields.Positive("beta_fast", defaults.beta_fast));
    TANDEM_ASSIGN_OR_RETURN(rope.beta_slow, fields.Positive("beta_slow", defaults.beta_slow));
    TANDEM_ASSIGN_OR_RETURN(rope.truncate, fields.Bool("truncate", defaults.truncate));
    TANDEM_ASSIGN_OR_RETURN(rope.attention_factor, fields.MaybePositive("attention_factor"));
    TANDEM_ASSIGN_OR_RETURN(rope.mscale, fields.MaybePositive("mscale"));
    TANDEM_ASSIGN_OR_RETURN(rope.mscale_all_dim, fields.MaybePositive("mscale_all_dim"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<RopeConfig> ReadRopeConfig(const ConfigFields& fields,
                                          int64_t max_position_embeddings) {
  RopeConfig rope;
  TANDEM_ASSIGN_OR_RETURN(rope.theta, fields.Positive("rope_theta", rope.theta));
  for (const char* key : {"rope_scaling", "rope_parameters"}) {
    TANDEM_ASSIGN_OR_RETURN(const auto scaling, fields.Object(key));
    if (!scaling.has_value()) continue;
    TANDEM_ASSIGN_OR_RETURN(rope.theta, scaling->Positive("rope_theta", rope.theta));
    TANDEM_RETURN_IF_ERROR(ReadRopeScaling(*scaling, max_position_embeddings, rope));
  }
  return rope;
}

}  // namespace tandem
