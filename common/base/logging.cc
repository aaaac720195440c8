#include "common/base/logging.h"

#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <nlohmann/json.hpp>

#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace tandem {
namespace {

constexpr absl::string_view kNames[] = {"debug", "info", "warning", "error"};

thread_local std::string current_request_id;
thread_local std::string current_traceparent;

spdlog::level::level_enum ToSpdlog(LogLevel level) {
  switch (level) {
    case LogLevel::kDebug:
      return spdlog::level::debug;
    case LogLevel::kInfo:
      return spdlog::level::info;
    case LogLevel::kWarning:
      return spdlog::level::warn;
    case LogLevel::kError:
      return spdlog::level::err;
  }
  return spdlog::level::info;
}

// Never destroyed: threads may log until the very end.
spdlog::logger& Logger() {
  static spdlog::logger* const logger = [] {
    auto* result = new spdlog::logger("tandem", std::make_shared<spdlog::sinks::stderr_sink_mt>());
    result->set_pattern("%v");
    result->set_level(spdlog::level::info);
    result->flush_on(spdlog::level::debug);
    return result;
  }();
  return *logger;
}

}  // namespace

absl::string_view LogLevelName(LogLevel level) { return kNames[static_cast<int>(level)]; }

std::optional<LogLevel> ParseLogLevel(absl::string_view name) {
  for (int i = 0; i < 4; ++i) {
    if (kNames[i] == name) return static_cast<LogLevel>(i);
  }
  return std::nullopt;
}

void SetLogLevel(LogLevel level) { Logger().set_level(ToSpdlog(level)); }

std::string FormatLogLine(LogLevel level, absl::string_view event,
                          std::initializer_list<LogField> fields) {
  nlohmann::ordered_json line;
  line["ts"] = absl::FormatTime("%Y-%m-%dT%H:%M:%E3SZ", absl::Now(), absl::UTCTimeZone());
  line["level"] = std::string(LogLevelName(level));
  line["event"] = std::string(event);
  for (const LogField& field : fields) {
    std::visit([&](const auto& value) { line[std::string(field.key)] = value; },
               field.value.value());
  }
  if (!current_request_id.empty() && !line.contains("request_id")) {
    line["request_id"] = current_request_id;
  }
  if (!current_traceparent.empty() && !line.contains("trace_id")) {
    line["trace_id"] = std::string(TraceIdOf(current_traceparent));
    line["span_id"] = std::string(SpanIdOf(current_traceparent));
  }
  return line.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

void Log(LogLevel level, absl::string_view event, std::initializer_list<LogField> fields) {
  spdlog::logger& logger = Logger();
  if (!logger.should_log(ToSpdlog(level))) return;
  logger.log(ToSpdlog(level), spdlog::string_view_t(FormatLogLine(level, event, fields)));
}

ScopedCallLog::ScopedCallLog(std::string request_id, std::string traceparent)
    : previous_request_id_(std::exchange(current_request_id, std::move(request_id))),
      previous_traceparent_(std::exchange(current_traceparent, std::move(traceparent))) {}

ScopedCallLog::~ScopedCallLog() {
  current_request_id = std::move(previous_request_id_);
  current_traceparent = std::move(previous_traceparent_);
}

absl::string_view TraceIdOf(absl::string_view traceparent) {
  return traceparent.empty() ? "" : traceparent.substr(3, 32);
}

absl::string_view SpanIdOf(absl::string_view traceparent) {
  return traceparent.empty() ? "" : traceparent.substr(36, 16);
}

}  // namespace tandem
