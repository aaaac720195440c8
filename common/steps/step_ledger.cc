#include "common/steps/step_ledger.h"

#include <limits>
#include <nlohmann/json.hpp>
#include <utility>

#include "common/base/errors/error.h"

namespace tandem::training {
namespace {

using nlohmann::json;

StepReport ReportFromJson(const json& object) {
  StepReport report;
  report.run_id = object.at("run_id");
  report.step = object.at("step");
  report.weights.version = object.at("version");
  report.skipped = object.at("skipped");
  report.skip_reason = object.at("skip_reason");
  for (const auto& [name, value] : object.at("metrics").items()) {
    // A metric that is NaN: JSON has none, so it was written as null.
    report.metrics[name] =
        value.is_null() ? std::numeric_limits<double>::quiet_NaN() : value.get<double>();
  }
  return report;
}

}  // namespace

const StepLedger::Entry* StepLedger::Lookup(absl::string_view run_id,
                                            absl::string_view request_id) const {
  for (const Entry& entry : entries_) {
    if (entry.report.run_id == run_id && entry.request_id == request_id) return &entry;
  }
  return nullptr;
}

absl::StatusOr<std::optional<StepReport>> StepLedger::Find(absl::string_view run_id,
                                                           absl::string_view request_id,
                                                           absl::string_view payload_digest) const {
  const Entry* const entry = Lookup(run_id, request_id);
  if (entry == nullptr) return std::optional<StepReport>();
  if (entry->payload_digest != payload_digest) {
    return WithReason(FieldError(absl::StatusCode::kAlreadyExists, "request_id",
                                 "was already used for a step with different content"),
                      reason::kRequestIdReused);
  }
  return std::optional<StepReport>(entry->report);
}

bool StepLedger::Contains(absl::string_view run_id, absl::string_view request_id) const {
  return Lookup(run_id, request_id) != nullptr;
}

StepReport& StepLedger::Record(std::string request_id, std::string payload_digest,
                               StepReport report) {
  entries_.push_back({std::move(request_id), std::move(payload_digest), std::move(report)});
  if (entries_.size() > capacity_) entries_.pop_front();
  return entries_.back().report;
}

json StepLedger::ToJson() const {
  json list = json::array();
  for (const Entry& entry : entries_) {
    const StepReport& report = entry.report;
    list.push_back({{"run_id", report.run_id},
                    {"request_id", entry.request_id},
                    {"payload_digest", entry.payload_digest},
                    {"step", report.step},
                    {"version", report.weights.version},
                    {"skipped", report.skipped},
                    {"skip_reason", report.skip_reason},
                    {"metrics", report.metrics}});
  }
  return list;
}

absl::Status StepLedger::FromJson(const json& list) {
  std::deque<Entry> entries;
  if (!list.is_array()) return absl::DataLossError("the table of done steps is broken");
  try {
    for (const json& item : list) {
      entries.push_back({item.at("request_id"), item.at("payload_digest"), ReportFromJson(item)});
    }
  } catch (const json::exception&) {
    return absl::DataLossError("the table of done steps holds a broken entry");
  }
  while (entries.size() > capacity_) entries.pop_front();
  entries_ = std::move(entries);
  return absl::OkStatus();
}

}  // namespace tandem::training
