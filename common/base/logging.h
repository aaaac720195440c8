// Structured logs: one JSON object per line on stderr.
//
//   Log(LogLevel::kInfo, "weights_committed", {{"version", 7}, {"bytes", total_bytes}});
//   →
//   {"ts":"2026-01-31T12:00:00.123Z","level":"info","event":"weights_committed","version":7,"bytes":…}
#ifndef TANDEM_COMMON_BASE_LOGGING_H_
#define TANDEM_COMMON_BASE_LOGGING_H_

#include <concepts>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <utility>
#include <variant>

#include "absl/strings/string_view.h"
#include "common/base/call_scope.h"

namespace tandem {

enum class LogLevel { kDebug, kInfo, kWarning, kError };

// "debug", "info", "warning", "error".
absl::string_view LogLevelName(LogLevel level);
std::optional<LogLevel> ParseLogLevel(absl::string_view name);

// Lines below `level` are dropped from now on. The default is info.
void SetLogLevel(LogLevel level);

// The value of a field.
class LogValue {
 public:
  // Implicit, so that a field is written {"name", value}.
  // NOLINTBEGIN(google-explicit-constructor)
  LogValue(const char* text) : value_(std::string(text)) {}
  LogValue(std::string text) : value_(std::move(text)) {}
  LogValue(absl::string_view text) : value_(std::string(text)) {}
  LogValue(bool value) : value_(value) {}
  LogValue(double value) : value_(value) {}
  LogValue(std::integral auto value) : value_(static_cast<int64_t>(value)) {}
  // NOLINTEND(google-explicit-constructor)

  using Variant = std::variant<bool, int64_t, double, std::string>;
  const Variant& value() const { return value_; }

 private:
  Variant value_;
};

struct LogField {
  absl::string_view key;
  LogValue value;
};

// Writes one line. `event` is a stable snake_case name; what varies goes into fields. The names of
// the calling thread's call (ScopedCallLog) are added as "request_id", "trace_id" and "span_id".
// Never throws; text that is not UTF-8 is repaired.
void Log(LogLevel level, absl::string_view event, std::initializer_list<LogField> fields = {});

// The line that Log would write, without the line break.
std::string FormatLogLine(LogLevel level, absl::string_view event,
                          std::initializer_list<LogField> fields);

// While it lives, lines of this thread carry the names of a call.
class ScopedCallLog {
 public:
  explicit ScopedCallLog(const CallScope& call)
      : ScopedCallLog(call.request_id, call.traceparent) {}
  // `traceparent` is a well-formed W3C trace context, or "".
  ScopedCallLog(std::string request_id, std::string traceparent);
  ~ScopedCallLog();
  ScopedCallLog(const ScopedCallLog&) = delete;
  ScopedCallLog& operator=(const ScopedCallLog&) = delete;

 private:
  std::string previous_request_id_;
  std::string previous_traceparent_;
};

// The fields of a traceparent, "00-<trace id>-<span id>-<flags>" (W3C Trace Context, version 00).
absl::string_view TraceIdOf(absl::string_view traceparent);
absl::string_view SpanIdOf(absl::string_view traceparent);

}  // namespace tandem

#endif  // TANDEM_COMMON_BASE_LOGGING_H_
