// Typed access to a JSON object of a Hugging Face config, for the families that read it. No torch.
#ifndef TANDEM_COMMON_MODEL_CONFIG_CONFIG_FIELDS_H_
#define TANDEM_COMMON_MODEL_CONFIG_CONFIG_FIELDS_H_

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace tandem {

// One JSON object and its path, empty for the outermost one. A key whose value is null counts as
// absent, as in Python's configs. Errors are INVALID_ARGUMENT with the field's full path
// ("config.json.rope_scaling.factor").
class ConfigFields {
 public:
  // `object` must outlive the fields.
  ConfigFields(const nlohmann::json& object, std::string path)
      : object_(object), path_(std::move(path)) {}

  const std::string& path() const { return path_; }
  const nlohmann::json& object() const { return object_; }
  std::string Path(absl::string_view key) const;
  // nullptr for an absent key.
  const nlohmann::json* Find(absl::string_view key) const;
  // Whether the key is there and null, where that is not the same as absent.
  bool IsNull(absl::string_view key) const;

  // A positive integer; an absent key gives `fallback`, or an error without one. So do the
  // functions below.
  absl::StatusOr<int64_t> Size(absl::string_view key, std::optional<int64_t> fallback = {}) const;
  // An integer that may be 0.
  absl::StatusOr<int64_t> Count(absl::string_view key, std::optional<int64_t> fallback = {}) const;
  // A positive number.
  absl::StatusOr<double> Positive(absl::string_view key, std::optional<double> fallback = {}) const;
  // The same as Size and Positive; nullopt for an absent key.
  absl::StatusOr<std::optional<int64_t>> MaybeSize(absl::string_view key) const;
  absl::StatusOr<std::optional<double>> MaybePositive(absl::string_view key) const;
  // A list of `count` positive numbers; an absent key is an error.
  absl::StatusOr<std::vector<double>> PositiveList(absl::string_view key, int64_t count) const;
  // A list of integers that are 0 or more; an absent key gives an empty one.
  absl::StatusOr<std::vector<int64_t>> Counts(absl::string_view key) const;
  absl::StatusOr<bool> Bool(absl::string_view key, std::optional<bool> fallback = {}) const;
  // A boolean; null is false, as in Python's conditions, and an absent key is an error.
  absl::StatusOr<bool> Truth(absl::string_view key) const;
  absl::StatusOr<std::string> String(absl::string_view key, absl::string_view fallback) const;
  // Adds one id, or a list of ids, to `ids`; an absent key adds nothing.
  absl::Status AppendIds(absl::string_view key, std::set<int64_t>& ids) const;
  // A nested object; nullopt for an absent key.
  absl::StatusOr<std::optional<ConfigFields>> Object(absl::string_view key) const;

  // UNIMPLEMENTED for `key`: "<feature> is not supported".
  absl::Status NotSupported(absl::string_view key, absl::string_view feature) const;

 private:
  const nlohmann::json& object_;
  std::string path_;
};

}  // namespace tandem

#endif  // TANDEM_COMMON_MODEL_CONFIG_CONFIG_FIELDS_H_
