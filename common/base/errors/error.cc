#include "common/base/errors/error.h"

#include <map>
#include <string>
#include <utility>

#include "absl/strings/cord.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace tandem {
namespace {

constexpr char kFieldUrl[] = "tandem/field";
constexpr char kReasonUrl[] = "tandem/reason";
constexpr char kRetryUrl[] = "tandem/retry_after_ms";

std::optional<std::string> Payload(const absl::Status& status, const char* url) {
  auto payload = status.GetPayload(url);
  if (!payload.has_value()) return std::nullopt;
  return std::string(*payload);
}

}  // namespace

absl::Status FieldError(absl::StatusCode code, absl::string_view path, absl::string_view message) {
  absl::Status status(code, absl::StrCat(path, ": ", message));
  status.SetPayload(kFieldUrl, absl::Cord(path));
  return status;
}

absl::Status InvalidField(absl::string_view path, absl::string_view message) {
  return FieldError(absl::StatusCode::kInvalidArgument, path, message);
}

absl::Status PrependFieldPath(absl::string_view prefix, absl::Status status) {
  if (status.ok() || prefix.empty()) return status;
  const std::optional<std::string> path = FieldPath(status);
  if (!path.has_value()) return WithFieldPath(prefix, status);
  return WithFieldPath(absl::StrCat(prefix, path->starts_with("[") ? "" : ".", *path), status);
}

absl::Status WithFieldPath(absl::string_view path, const absl::Status& status) {
  if (status.ok()) return status;
  std::string message(status.message());
  if (const std::optional<std::string> old = FieldPath(status);
      old.has_value() && message.starts_with(*old + ": ")) {
    message = message.substr(old->size() + 2);
  }
  absl::Status result(status.code(), absl::StrCat(path, ": ", message));
  status.ForEachPayload(
      [&](absl::string_view url, const absl::Cord& payload) { result.SetPayload(url, payload); });
  result.SetPayload(kFieldUrl, absl::Cord(path));
  return result;
}

std::optional<std::string> FieldPath(const absl::Status& status) {
  return Payload(status, kFieldUrl);
}

absl::Status WithReason(absl::Status status, const ErrorReason& reason) {
  return WithReasonNamed(std::move(status), reason.name);
}

absl::Status WithReasonNamed(absl::Status status, absl::string_view name) {
  status.SetPayload(kReasonUrl, absl::Cord(name));
  return status;
}

std::optional<std::string> Reason(const absl::Status& status) {
  return Payload(status, kReasonUrl);
}

bool HasReason(const absl::Status& status, const ErrorReason& reason) {
  return Reason(status) == reason.name;
}

absl::Status WithRetryAfter(absl::Status status, int64_t milliseconds) {
  status.SetPayload(kRetryUrl, absl::Cord(absl::StrCat(milliseconds)));
  return status;
}

std::optional<int64_t> RetryAfterMilliseconds(const absl::Status& status) {
  const std::optional<std::string> text = Payload(status, kRetryUrl);
  int64_t value = 0;
  if (!text.has_value() || !absl::SimpleAtoi(*text, &value)) return std::nullopt;
  return value;
}

std::string ErrorLine(const absl::Status& status) {
  std::map<std::string, std::string> details;
  status.ForEachPayload([&](absl::string_view name, const absl::Cord& value) {
    details.emplace(std::string(name), std::string(value));
  });
  std::string line =
      status.ok() ? "OK"
                  : absl::StrCat(absl::StatusCodeToString(status.code()), ": ", status.message());
  for (const auto& [name, value] : details) absl::StrAppend(&line, " [", name, "='", value, "']");
  return line;
}

}  // namespace tandem
