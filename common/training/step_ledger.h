// The table of train steps that were done, for exactly-once application. It is saved in the same
// checkpoint as the weights, so a repeat after a restart is answered like one before it.
#ifndef TANDEM_COMMON_TRAINING_STEP_LEDGER_H_
#define TANDEM_COMMON_TRAINING_STEP_LEDGER_H_

#include <cstddef>
#include <deque>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "common/training/step_report.h"

namespace tandem::training {

class StepLedger {
 public:
  // The oldest entry is dropped beyond `capacity`: a repeat of it then meets the version fence.
  explicit StepLedger(size_t capacity = 256) : capacity_(capacity) {}

  // The report stored for (run_id, request_id), or nothing if it is new. ALREADY_EXISTS (reason
  // REQUEST_ID_REUSED) if the request id was used with another payload.
  absl::StatusOr<std::optional<StepReport>> Find(absl::string_view run_id,
                                                 absl::string_view request_id,
                                                 absl::string_view payload_digest) const;
  bool Contains(absl::string_view run_id, absl::string_view request_id) const;

  // The stored report, under its run_id, to be completed in place.
  StepReport& Record(std::string request_id, std::string payload_digest, StepReport report);
  // Takes the newest entry back.
  void RemoveNewest() { entries_.pop_back(); }

  size_t size() const { return entries_.size(); }

  // An array, oldest first. The digest of a report's weights is not in it: it is the lineage's.
  nlohmann::json ToJson() const;
  // Replaces everything. DATA_LOSS, and nothing changed, for what ToJson did not make.
  absl::Status FromJson(const nlohmann::json& list);

 private:
  struct Entry {
    std::string request_id, payload_digest;
    StepReport report;
  };
  const Entry* Lookup(absl::string_view run_id, absl::string_view request_id) const;

  size_t capacity_;
  std::deque<Entry> entries_;  // oldest first
};

}  // namespace tandem::training

#endif  // TANDEM_COMMON_TRAINING_STEP_LEDGER_H_
