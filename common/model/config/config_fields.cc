#include "common/model/config/config_fields.h"

#include "absl/strings/str_cat.h"
#include "common/base/errors/error.h"
#include "common/base/errors/status_macros.h"

namespace tandem {
namespace {

using nlohmann::json;

constexpr int64_t kMaxSize = int64_t{1} << 31;

}  // namespace

std::string ConfigFields::Path(absl::string_view key) const {
  return path_.empty() ? std::string(key) : absl::StrCat(path_, ".", key);
}

const json* ConfigFields::Find(absl::string_view key) const {
  const auto found = object_.find(std::string(key));
  return found == object_.end() || found->is_null() ? nullptr : &*found;
}

bool ConfigFields::IsNull(absl::string_view key) const {
  const auto found = object_.find(std::string(key));
  return found != object_.end() && found->is_null();
}

absl::StatusOr<int64_t> ConfigFields::Count(absl::string_view key,
                                            std::optional<int64_t> fallback) const {
  const json* value = Find(key);
  if (value == nullptr) {
    if (fallback.has_value()) return *fallback;
    return InvalidField(Path(key), "is missing");
  }
  if (!value->is_number_integer() || *value < 0 || *value > kMaxSize) {
    return InvalidField(Path(key), "must be an integer, 0 or more");
  }
  return value->get<int64_t>();
}

absl::StatusOr<int64_t> ConfigFields::Size(absl::string_view key,
                                           std::optional<int64_t> fallback) const {
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

absl::StatusOr<double> ConfigFields::Positive(absl::string_view key,
                                              std::optional<double> fallback) const {
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

absl::StatusOr<std::optional<int64_t>> ConfigFields::MaybeSize(absl::string_view key) const {
  if (Find(key) == nullptr) return std::optional<int64_t>();
  TANDEM_ASSIGN_OR_RETURN(const int64_t value, Size(key));
  return std::optional<int64_t>(value);
}

absl::StatusOr<std::optional<double>> ConfigFields::MaybePositive(absl::string_view key) const {
  if (Find(key) == nullptr) return std::optional<double>();
  TANDEM_ASSIGN_OR_RETURN(const double value, Positive(key, {}));
  return std::optional<double>(value);
}

absl::StatusOr<std::vector<double>> ConfigFields::PositiveList(absl::string_view key,
                                                               int64_t count) const {
  const json* value = Find(key);
  if (value == nullptr) return InvalidField(Path(key), "is missing");
  const auto wrong = [&] {
    return InvalidField(Path(key), absl::StrCat("must be a list of ", count, " positive numbers"));
  };
  if (!value->is_array() || static_cast<int64_t>(value->size()) != count) return wrong();
  std::vector<double> numbers;
  for (const json& number : *value) {
    if (!number.is_number() || !(number.get<double>() > 0)) return wrong();
    numbers.push_back(number.get<double>());
  }
  return numbers;
}

absl::StatusOr<std::vector<int64_t>> ConfigFields::Counts(absl::string_view key) const {
  const json* value = Find(key);
  std::vector<int64_t> numbers;
  if (value == nullptr) return numbers;
  const auto wrong = [&] {
    return InvalidField(Path(key), "must be a list of integers, 0 or more");
  };
  if (!value->is_array()) return wrong();
  for (const json& number : *value) {
    if (!number.is_number_integer() || number < 0 || number > kMaxSize) return wrong();
    numbers.push_back(number.get<int64_t>());
  }
  return numbers;
}

absl::StatusOr<bool> ConfigFields::Bool(absl::string_view key, std::optional<bool> fallback) const {
  const json* value = Find(key);
  if (value == nullptr) {
    if (fallback.has_value()) return *fallback;
    return InvalidField(Path(key), "is missing");
  }
  if (!value->is_boolean()) return InvalidField(Path(key), "must be true or false");
  return value->get<bool>();
}

absl::StatusOr<bool> ConfigFields::Truth(absl::string_view key) const {
  if (IsNull(key)) return false;
  return Bool(key);
}

absl::StatusOr<std::string> ConfigFields::String(absl::string_view key,
                                                 absl::string_view fallback) const {
  const json* value = Find(key);
  if (value == nullptr) return std::string(fallback);
  if (!value->is_string()) return InvalidField(Path(key), "must be text");
  return value->get<std::string>();
}

absl::Status ConfigFields::AppendIds(absl::string_view key, std::set<int64_t>& ids) const {
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

absl::StatusOr<std::optional<ConfigFields>> ConfigFields::Object(absl::string_view key) const {
  const json* value = Find(key);
  if (value == nullptr) return std::optional<ConfigFields>();
  if (!value->is_object()) return InvalidField(Path(key), "must be an object");
  return std::optional<ConfigFields>(ConfigFields(*value, Path(key)));
}

absl::Status ConfigFields::NotSupported(absl::string_view key, absl::string_view feature) const {
  return FieldError(absl::StatusCode::kUnimplemented, Path(key),
                    absl::StrCat(feature, " is not supported"));
}

}  // namespace tandem
