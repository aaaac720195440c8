// A typed client of tandem.critic.v1.CriticService for C++ servers. Blocking and thread-safe.
#ifndef TANDEM_CLIENTS_CPP_CRITIC_CLIENT_H_
#define TANDEM_CLIENTS_CPP_CRITIC_CLIENT_H_

#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "clients/cpp/retry.h"
#include "tandem/critic/v1/critic.grpc.pb.h"

namespace tandem::client {

class CriticClient {
 public:
  explicit CriticClient(std::shared_ptr<grpc::ChannelInterface> channel,
                        const RetryOptions& retry = {});

  absl::StatusOr<critic::v1::GetServerInfoResponse> GetServerInfo() const;

  // One response a request, in order, all of one version: ABORTED if the critic's weights changed
  // in between.
  absl::StatusOr<std::vector<critic::v1::ComputeValuesResponse>> ComputeValues(
      const std::vector<critic::v1::ComputeValuesRequest>& requests) const;

  // header.num_samples is set from `samples`. Every attempt carries header.request_id, so the step
  // is applied once.
  absl::StatusOr<critic::v1::TrainStepResponse> TrainStep(
      critic::v1::TrainStepHeader header,
      const std::vector<critic::v1::ValueSample>& samples) const;

 private:
  const std::unique_ptr<critic::v1::CriticService::Stub> stub_;
  const RetryOptions retry_;
};

}  // namespace tandem::client

#endif  // TANDEM_CLIENTS_CPP_CRITIC_CLIENT_H_
