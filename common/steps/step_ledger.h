// The table of done train steps, which makes a step apply exactly once. It is saved in the same
// checkpoint as the weights, so a repeat after a restart gets the same answer as one before it.
#ifndef TANDEM_COMMON_STEPS_STEP_LEDGER_H_
#define TANDEM_COMMON_STEPS_STEP_LEDGER_H_

#include <cstddef>
#include <deque>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "common/steps/step_report.h"

namespace tandem::training {

class StepLedger {
 public:
  // Holds the newest `capacity` steps; a repeat of an older one is refused for its version.
  explicit StepLedger(size_t capacity = 256) : capacity_(capacity) {}

  // Returns the report stored for (run_id, request_id), or nothing for a new step. ALREADY_EXISTS
  // (reason REQUEST_ID_REUSED) if the request id was used with another payload.
  absl::StatusOr<std::optional<StepReport>> Find(absl::string_view run_id,
                                                 absl::string_view request_id,
                                                 absl::string_view payload_digest) const;
  bool Contains(absl::string_view run_id, absl::string_view request_id) const;

  // Adds the report under its run_id, and returns the stored copy, to be completed in place.
  StepReport& Record(std::string request_id, std::string payload_digest, StepReport report);
  // Removes the newest entry.
  void RemoveNewest() { entries_.pop_back(); }

  // Returns the run of the newest entry; empty without entries.
  absl::string_view newest_run_id() const {
    return entries_.empty() ? absl::string_view() : entries_.back().report.run_id;
  }
  size_t size() const { return entries_.size(); }

  // Returns an array, oldest first. The digests of the reports' weights are not in it: the lineage
  // has them.
  nlohmann::json ToJson() const;
  // Replaces everything. DATA_LOSS, with nothing changed, for a document that ToJson did not make.
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

#endif  // TANDEM_COMMON_STEPS_STEP_LEDGER_H_
