#include "clients/cpp/critic_client.h"

#include <grpcpp/client_context.h>

#include <thread>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "common/base/status_macros.h"
#include "common/rpc/channel.h"
#include "common/rpc/error_table.h"

namespace tandem::client {
namespace {

namespace v1 = critic::v1;

// One attempt. Requests are written while responses are read: either side alone would fill the
// flow-control window and stop.
absl::StatusOr<std::vector<v1::ComputeValuesResponse>> ComputeValuesOnce(
    v1::CriticService::Stub& stub, rpc::CallContext&& context,
    const std::vector<v1::ComputeValuesRequest>& requests, const std::function<void()>& progress) {
  auto stream = stub.ComputeValues(context.get());
  std::thread writer([&] {
    for (const auto& request : requests) {
      if (!stream->Write(request)) return;
    }
    stream->WritesDone();
  });
  std::vector<v1::ComputeValuesResponse> responses;
  responses.reserve(requests.size());
  v1::ComputeValuesResponse response;
  bool too_many = false;
  while (!too_many && stream->Read(&response)) {
    too_many = responses.size() == requests.size();
    responses.push_back(std::move(response));
    progress();
  }
  if (too_many) context.get()->TryCancel();
  writer.join();
  absl::Status status = rpc::FromGrpcStatus(stream->Finish());
  if (too_many || (status.ok() && responses.size() != requests.size())) {
    return absl::InternalError(absl::StrCat("the critic sent ", responses.size(), " answers to ",
                                            requests.size(), " requests"));
  }
  TANDEM_RETURN_IF_ERROR(status);
  return responses;
}

absl::StatusOr<v1::TrainStepResponse> TrainStepOnce(v1::CriticService::Stub& stub,
                                                    rpc::CallContext&& context,
                                                    const v1::TrainStepHeader& header,
                                                    const std::vector<v1::ValueSample>& samples) {
  v1::TrainStepResponse response;
  auto stream = stub.TrainStep(context.get(), &response);
  v1::TrainStepRequest message;
  *message.mutable_header() = header;
  bool writable = stream->Write(message);
  for (const auto& sample : samples) {
    if (!writable) break;
    *message.mutable_sample() = sample;
    writable = stream->Write(message);
  }
  if (writable) stream->WritesDone();
  TANDEM_RETURN_IF_ERROR(rpc::FromGrpcStatus(stream->Finish()));
  return response;
}

}  // namespace

CriticClient::CriticClient(std::shared_ptr<grpc::ChannelInterface> channel,
                           const rpc::RetryOptions& retry)
    : stub_(v1::CriticService::NewStub(channel)), retry_(retry) {}

absl::StatusOr<std::vector<v1::ComputeValuesResponse>> CriticClient::ComputeValues(
    const CallScope& call, const std::vector<v1::ComputeValuesRequest>& requests,
    const std::function<void()>& progress) const {
  TANDEM_ASSIGN_OR_RETURN(auto responses, rpc::CallWithRetry(retry_, call, [&] {
                            return ComputeValuesOnce(*stub_,
                                                     rpc::CallContext(call, retry_.attempt_timeout),
                                                     requests, progress);
                          }));
  for (const auto& response : responses) {
    if (response.weights().version() != responses.front().weights().version()) {
      return absl::AbortedError(absl::StrCat(
          "the critic's weights changed from version ", responses.front().weights().version(),
          " to ", response.weights().version(), " while it computed values"));
    }
  }
  return responses;
}

absl::StatusOr<v1::TrainStepResponse> CriticClient::TrainStep(
    const CallScope& call, v1::TrainStepHeader header,
    const std::vector<v1::ValueSample>& samples) const {
  if (header.request_id().empty()) {
    return absl::InvalidArgumentError("header.request_id: is required");
  }
  header.set_num_samples(static_cast<int32_t>(samples.size()));
  return rpc::CallWithRetry(retry_, call, [&] {
    return TrainStepOnce(*stub_, rpc::CallContext(call, retry_.attempt_timeout), header, samples);
  });
}

}  // namespace tandem::client
