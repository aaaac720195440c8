// The trainer engine's CriticConnection over gRPC.
#ifndef TANDEM_SERVICES_TRAINER_SERVICE_CRITIC_CONNECTION_H_
#define TANDEM_SERVICES_TRAINER_SERVICE_CRITIC_CONNECTION_H_

#include <memory>

#include "clients/cpp/critic_client.h"
#include "services/trainer/engine/critic_connection.h"

namespace tandem::trainer {

std::shared_ptr<CriticConnection> MakeCriticConnection(
    std::shared_ptr<const client::CriticClient> client);

}  // namespace tandem::trainer

#endif  // TANDEM_SERVICES_TRAINER_SERVICE_CRITIC_CONNECTION_H_
