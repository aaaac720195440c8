#include "common/training/step_ledger.h"

#include <nlohmann/json.hpp>
#include <utility>

#include "common/base/error.h"

namespace tandem::training {

using nlohmann::json;

absl::StatusOr<std::optional<std::string>> StepLedger::Find(
    absl::string_view run_id, absl::string_view request_id,
    absl::string_view payload_digest) const {
  for (const Entry& entry : entries_) {
    if (entry.run_id != run_id || entry.request_id != request_id) continue;
    if (entry.payload_digest != payload_digest) {
      return WithReason(FieldError(absl::StatusCode::kAlreadyExists, "request_id",
                                   "was used for a step with another content"),
                        reason::kRequestIdReused);
    }
    return std::optional<std::string>(entry.reply);
  }
  return std::optional<std::string>();
}

void StepLedger::Record(std::string run_id, std::string request_id, std::string payload_digest,
                        std::string reply) {
  entries_.push_back(
      {std::move(run_id), std::move(request_id), std::move(payload_digest), std::move(reply)});
  if (entries_.size() > capacity_) entries_.pop_front();
}

std::string StepLedger::Serialize() const {
  json list = json::array();
  for (const Entry& entry : entries_) {
    list.push_back({entry.run_id, entry.request_id, entry.payload_digest, entry.reply});
  }
  return list.dump(-1, ' ', /*ensure_ascii=*/true, json::error_handler_t::replace);
}

absl::Status StepLedger::Deserialize(absl::string_view text) {
  const json list = json::parse(text.begin(), text.end(), nullptr, /*allow_exceptions=*/false);
  std::deque<Entry> entries;
  if (!list.is_array()) return absl::DataLossError("the table of done steps is broken");
  for (const json& item : list) {
    if (!item.is_array() || item.size() != 4) {
      return absl::DataLossError("the table of done steps holds a broken entry");
    }
    for (const json& field : item) {
      if (!field.is_string()) {
        return absl::DataLossError("the table of done steps holds a broken entry");
      }
    }
    entries.push_back({item[0], item[1], item[2], item[3]});
  }
  while (entries.size() > capacity_) entries.pop_front();
  entries_ = std::move(entries);
  return absl::OkStatus();
}

}  // namespace tandem::training
