// The table of train steps that were done, for exactly-once application. It is saved in the same
// checkpoint as the weights, so a repeat after a restart is answered like one before it.
#ifndef TANDEM_COMMON_TRAINING_STEP_LEDGER_H_
#define TANDEM_COMMON_TRAINING_STEP_LEDGER_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace tandem::training {

class StepLedger {
 public:
  // The oldest entry is dropped beyond `capacity`: a repeat of it then meets the version fence.
  explicit StepLedger(size_t capacity = 256) : capacity_(capacity) {}

  // The reply stored for (run_id, request_id), or nothing if it is new. ALREADY_EXISTS (reason
  // REQUEST_ID_REUSED) if the request id was used with another payload.
  absl::StatusOr<std::optional<std::string>> Find(absl::string_view run_id,
                                                  absl::string_view request_id,
                                                  absl::string_view payload_digest) const;

  void Record(std::string run_id, std::string request_id, std::string payload_digest,
              std::string reply);

  size_t size() const { return entries_.size(); }

  // JSON text, and back. DATA_LOSS for a text that Serialize did not write.
  std::string Serialize() const;
  absl::Status Deserialize(absl::string_view text);

 private:
  struct Entry {
    std::string run_id, request_id, payload_digest, reply;
  };
  size_t capacity_;
  std::deque<Entry> entries_;  // oldest first
};

}  // namespace tandem::training

#endif  // TANDEM_COMMON_TRAINING_STEP_LEDGER_H_
