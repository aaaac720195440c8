// A typed client of tandem.critic.v1.CriticService for C++ servers. Blocking and thread-safe.
#ifndef TANDEM_CLIENTS_CPP_CRITIC_CLIENT_H_
#define TANDEM_CLIENTS_CPP_CRITIC_CLIENT_H_

#include <functional>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "common/base/call_scope.h"
#include "common/rpc/retry.h"
#include "tandem/critic/v1/critic.grpc.pb.h"

namespace tandem::client {

// Every method carries the deadline and the request id of the call that it is made for, and returns
// CANCELLED or DEADLINE_EXCEEDED at once when that call is over.
class CriticClient {
 public:
  explicit CriticClient(std::shared_ptr<grpc::ChannelInterface> channel,
                        const rpc::RetryOptions& retry = {});

  // One response for each request, in order, all of one version: ABORTED if the critic's weights
  // changed in between. `progress` is called with every response.
  absl::StatusOr<std::vector<critic::v1::ComputeValuesResponse>> ComputeValues(
      const CallScope& call, const std::vector<critic::v1::ComputeValuesRequest>& requests,
      const std::function<void()>& progress) const;

  // header.num_samples is set from `samples`. Every attempt carries header.request_id, so the step
  // is applied once.
  absl::StatusOr<critic::v1::TrainStepResponse> TrainStep(
      const CallScope& call, critic::v1::TrainStepHeader header,
      const std::vector<critic::v1::ValueSample>& samples) const;

 private:
  const std::unique_ptr<critic::v1::CriticService::Stub> stub_;
  const rpc::RetryOptions retry_;
};

}  // namespace tandem::client

#endif  // TANDEM_CLIENTS_CPP_CRITIC_CLIENT_H_
