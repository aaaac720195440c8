// Defaults and checks of the three server configurations. The defaults stand in server_config.cc
// and nowhere else, but for the ports (below) and those of TandemConfig (common/coauthoring).
#ifndef TANDEM_COMMON_CONFIG_SERVER_CONFIG_H_
#define TANDEM_COMMON_CONFIG_SERVER_CONFIG_H_

#include "absl/status/status.h"
#include "common/base/logging.h"
#include "tandem/config/v1/server_config.pb.h"

namespace tandem::config {

using v1::CriticServerConfig;
using v1::RolloutServerConfig;
using v1::ServerOptions;
using v1::TrainerServerConfig;

struct DefaultPorts {
  int grpc;
  int metrics;
};
inline constexpr DefaultPorts kRolloutPorts{7701, 9701};
inline constexpr DefaultPorts kTrainerPorts{7702, 9702};
inline constexpr DefaultPorts kCriticPorts{7703, 9703};

// Fills every field that is not set with its default, then checks all ranges. Afterwards every
// field with a default has a value and every enum is specified, but for the settings of a junior
// that there is not. INVALID_ARGUMENT or UNIMPLEMENTED with the field's path. Fields that are set
// are never changed.
absl::Status Resolve(RolloutServerConfig* config);
absl::Status Resolve(TrainerServerConfig* config);
absl::Status Resolve(CriticServerConfig* config);

// The level of resolved options.
LogLevel LogLevelOf(const ServerOptions& options);

// Whether a role has a token file, so that callers need a token.
bool HasTokens(const v1::TokenOptions& tokens);

}  // namespace tandem::config

#endif  // TANDEM_COMMON_CONFIG_SERVER_CONFIG_H_
