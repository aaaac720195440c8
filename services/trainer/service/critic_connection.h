// The trainer engine's CriticConnection over gRPC (tandem.critic.v1.CriticService).
#ifndef TANDEM_SERVICES_TRAINER_SERVICE_CRITIC_CONNECTION_H_
#define TANDEM_SERVICES_TRAINER_SERVICE_CRITIC_CONNECTION_H_

#include <grpcpp/impl/codegen/channel_interface.h>

#include <memory>

#include "common/rpc/client/retry.h"
#include "services/trainer/engine/auxiliary/critic_connection.h"

namespace tandem::trainer {

// Thread-safe. A call that finds the critic unavailable is repeated as `retry` says, with the same
// request id, so that a step is applied once. ABORTED if the critic's weights changed while it
// computed values; INTERNAL for an answer that does not fit the request.
std::shared_ptr<CriticConnection> MakeCriticConnection(
    std::shared_ptr<grpc::ChannelInterface> channel, const rpc::RetryOptions& retry = {});

}  // namespace tandem::trainer

#endif  // TANDEM_SERVICES_TRAINER_SERVICE_CRITIC_CONNECTION_H_
