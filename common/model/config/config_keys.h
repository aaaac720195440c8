// What a family makes of each key of config.json: tables that the readers of configurations read
// through. No torch.
#ifndef TANDEM_COMMON_MODEL_CONFIG_CONFIG_KEYS_H_
#define TANDEM_COMMON_MODEL_CONFIG_CONFIG_KEYS_H_

#include <initializer_list>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/model/config/config_fields.h"

namespace tandem {

// A key that a class of `transformers` has, or reads where it is there.
struct ConfigKey {
  enum class Fate {
    kObeyed,       // the reader of the family sees it
    kNoEffect,     // changes nothing that a server computes
    kOnlyDefault,  // refused unless it has the value of the class
  };

  const char* name;
  Fate fate;
  // JSON text: the value that the class of `transformers` has where config.json lacks the key.
  const char* value = "null";
  bool nullable = false;          // whether null is a value of the key
  const char* feature = nullptr;  // kOnlyDefault: what another value asks for
  // The key of which this one is another name.
  const char* other_name_of = nullptr;
};

using ConfigKeys = std::vector<ConfigKey>;

constexpr ConfigKey Obeyed(const char* name, const char* value) {
  return {.name = name, .fate = ConfigKey::Fate::kObeyed, .value = value};
}
constexpr ConfigKey OrNull(const char* name, const char* value = "null") {
  return {.name = name, .fate = ConfigKey::Fate::kObeyed, .value = value, .nullable = true};
}
constexpr ConfigKey OtherName(const char* name, const char* of) {
  return {.name = name, .fate = ConfigKey::Fate::kObeyed, .other_name_of = of};
}
constexpr ConfigKey NoEffect(const char* name) {
  return {.name = name, .fate = ConfigKey::Fate::kNoEffect};
}
// null is accepted with the value: the classes take it for none.
constexpr ConfigKey Only(const char* name, const char* value, const char* feature) {
  return {.name = name,
          .fate = ConfigKey::Fate::kOnlyDefault,
          .value = value,
          .nullable = true,
          .feature = feature};
}

ConfigKeys Join(std::initializer_list<ConfigKeys> tables);

// An object of config.json and its table; `object` is "" for the outermost one, and "text_config",
// "vision_config" or "rope_parameters".
struct ConfigSection {
  std::string object;
  ConfigKeys keys;
};

// Returns the obeyed keys of `fields` alone, each with the value of config.json or, where that
// lacks the key, of its class: what the table does not obey, no reader can see. A key with another
// name has the value under both names. INVALID_ARGUMENT with the field's path for a null that is no
// value, and for two names with different values; UNIMPLEMENTED for kOnlyDefault.
absl::StatusOr<nlohmann::json> ObeyedKeys(const ConfigFields& fields, const ConfigKeys& keys);

}  // namespace tandem

#endif  // TANDEM_COMMON_MODEL_CONFIG_CONFIG_KEYS_H_
