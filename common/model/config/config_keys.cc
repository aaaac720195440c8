#include "common/model/config/config_keys.h"

#include "absl/strings/str_cat.h"
#include "common/base/errors/error.h"
#include "common/base/errors/status_macros.h"

namespace tandem {
namespace {

using nlohmann::json;
using Fate = ConfigKey::Fate;

// Adds the value of an obeyed key of its own name.
absl::Status AddObeyed(const ConfigFields& fields, const ConfigKey& key, json& obeyed) {
  if (fields.IsNull(key.name) && !key.nullable) {
    return InvalidField(fields.Path(key.name), "must not be null");
  }
  const json* const value = fields.Find(key.name);
  const bool is_absent = value == nullptr && !fields.IsNull(key.name);
  obeyed[key.name] = is_absent ? json::parse(key.value) : value == nullptr ? json() : *value;
  return absl::OkStatus();
}

absl::Status AddOtherName(const ConfigFields& fields, const ConfigKey& key, json& obeyed) {
  const json* const value = fields.Find(key.name);
  if (value == nullptr) return absl::OkStatus();
  const json* const own = fields.Find(key.other_name_of);
  if (own != nullptr && *own != *value) {
    return InvalidField(fields.Path(key.name),
                        absl::StrCat("is ", value->dump(), ", and ", key.other_name_of,
                                     ", another name of it, is ", own->dump()));
  }
  obeyed[key.name] = *value;
  obeyed[key.other_name_of] = *value;
  return absl::OkStatus();
}

}  // namespace

ConfigKeys Join(std::initializer_list<ConfigKeys> tables) {
  ConfigKeys joined;
  for (const ConfigKeys& table : tables) joined.insert(joined.end(), table.begin(), table.end());
  return joined;
}

absl::StatusOr<json> ObeyedKeys(const ConfigFields& fields, const ConfigKeys& keys) {
  json obeyed = json::object();
  for (const ConfigKey& key : keys) {
    const json* const value = fields.Find(key.name);
    if (key.fate == Fate::kOnlyDefault && value != nullptr && *value != json::parse(key.value)) {
      return fields.NotSupported(key.name, value->is_primitive()
                                               ? absl::StrCat(key.feature, " (", value->dump(), ")")
                                               : std::string(key.feature));
    }
    if (key.fate != Fate::kObeyed || key.other_name_of != nullptr) continue;
    TANDEM_RETURN_IF_ERROR(AddObeyed(fields, key, obeyed));
  }
  for (const ConfigKey& key : keys) {
    if (key.other_name_of != nullptr) {
      TANDEM_RETURN_IF_ERROR(AddOtherName(fields, key, obeyed));
    }
  }
  return obeyed;
}

}  // namespace tandem
