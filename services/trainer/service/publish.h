// One set of weights to many receivers.
#ifndef TANDEM_SERVICES_TRAINER_SERVICE_PUBLISH_H_
#define TANDEM_SERVICES_TRAINER_SERVICE_PUBLISH_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/base/call_scope.h"
#include "common/rpc/channel.h"
#include "common/tensor/weight_transfer.h"

namespace tandem::trainer {

// INVALID_ARGUMENT unless there is at least one target, each "host:port" and none twice.
absl::Status CheckTargets(const std::vector<std::string>& targets);

struct Delivery {
  absl::StatusOr<WeightsVersion> result;  // what the receiver serves now, or why it does not
  int64_t bytes_sent = 0;                 // 0 when the receiver already served these weights
};

// Sends `source` to every target and commits it there, in parallel; blocks until each has succeeded
// or failed, which each has as soon as `call` is over. One receiver's failure does not concern the
// others. Results are in the order of `targets`. The update's id is made from version and digest,
// so a repeat goes on where an interrupted publication stopped, and a receiver that serves the
// weights already is left alone. `allow_rollback` replaces a version that is not below.
std::vector<Delivery> PublishToAll(const std::vector<std::string>& targets,
                                   const WeightSource& source, bool allow_rollback,
                                   const rpc::ChannelOptions& channel_options,
                                   const CallScope& call);

}  // namespace tandem::trainer

#endif  // TANDEM_SERVICES_TRAINER_SERVICE_PUBLISH_H_
