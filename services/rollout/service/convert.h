// Conversions between messages of tandem.rollout.v1 and the plain structs of the engine.
#ifndef TANDEM_SERVICES_ROLLOUT_SERVICE_CONVERT_H_
#define TANDEM_SERVICES_ROLLOUT_SERVICE_CONVERT_H_

#include "absl/status/statusor.h"
#include "common/base/machine/rank_environment.h"
#include "common/coauthoring/tandem_config.h"
#include "services/rollout/engine/types.h"
#include "tandem/config/v1/server_config.pb.h"
#include "tandem/rollout/v1/rollout.pb.h"

namespace tandem::rollout {

// `config` must be resolved (common/config/server_config.h).
EngineOptions ToEngineOptions(const config::v1::RolloutServerConfig& config,
                              const RankEnvironment& environment);

// Converts a prompt; unset fields of its tandem get `defaults`. INVALID_ARGUMENT with a path
// relative to the prompt; the engine's Validate checks the rest. The caller adds the blobs.
absl::StatusOr<PromptRequest> PromptFromProto(const v1::Prompt& prompt,
                                              const TandemConfig& defaults);

v1::GenerateResponse TokensToProto(const std::string& request_id, const TokensDelta& delta);
v1::GenerateResponse FinishedToProto(const std::string& request_id, const Trajectory& trajectory,
                                     const SampleDrafts& drafts);
v1::GenerateResponse FailedToProto(const std::string& request_id, const absl::Status& status);

// INVALID_ARGUMENT for an image of unknown kind; the engine checks the rest.
absl::StatusOr<ScoreRequest> ScoreFromProto(const v1::ScoreRequest& proto);
v1::ScoreResponse ScoreToProto(const ScoreResult& result);

// Adds the engine's state to a response that describes the server.
void InfoToProto(const EngineInfo& info, const TandemConfig& defaults,
                 const WeightsVersion& weights, bool paused, v1::GetServerInfoResponse* response);

}  // namespace tandem::rollout

#endif  // TANDEM_SERVICES_ROLLOUT_SERVICE_CONVERT_H_
