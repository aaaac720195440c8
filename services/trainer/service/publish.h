// Publication of one set of weights to many receivers.
#ifndef TANDEM_SERVICES_TRAINER_SERVICE_PUBLISH_H_
#define TANDEM_SERVICES_TRAINER_SERVICE_PUBLISH_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/base/call_scope.h"
#include "common/rpc/client/channel.h"
#include "common/rpc/transfer/weight_sender.h"
#include "common/weights/weight_transfer.h"

namespace tandem::trainer {

// INVALID_ARGUMENT unless there is at least one target, each "host:port" and none twice.
absl::Status CheckTargets(const std::vector<std::string>& targets);

// The receivers of one publication, which are called in parallel.
class Receivers {
 public:
  // Connects to each of `targets` with its first call.
  Receivers(const std::vector<std::string>& targets, const rpc::ChannelOptions& channel_options);

  // Returns what each receiver wants, in the order of the targets. Send asks again, and reports the
  // errors.
  std::vector<absl::StatusOr<rpc::WantedWeights>> AskWanted(const CallScope& call) const;

  // Sends `source` to every receiver and commits it there. Blocks until every delivery has
  // succeeded or failed; they fail as soon as `call` is over. Deliveries are independent, and in
  // the order of the targets. The update's id is made from version and digests, so a repeat
  // continues where an interrupted publication stopped. Receivers that serve the weights already
  // are left alone, and each gets the components that it takes. `allow_rollback` also replaces an
  // equal or higher version.
  std::vector<absl::StatusOr<rpc::SentWeights>> Send(const WeightSource& source,
                                                     bool allow_rollback,
                                                     const CallScope& call) const;

 private:
  std::vector<std::unique_ptr<weights::v1::WeightService::StubInterface>> stubs_;
};

}  // namespace tandem::trainer

#endif  // TANDEM_SERVICES_TRAINER_SERVICE_PUBLISH_H_
