#include "clients/cpp/critic_client.h"

#include <grpcpp/client_context.h>

#include <thread>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "common/base/status_macros.h"
#include "common/rpc/error_table.h"

namespace tandem::client {
namespace {

namespace v1 = critic::v1;

void SetDeadline(const RetryOptions& retry, grpc::ClientContext* context) {
  context->set_deadline(absl::ToChronoTime(absl::Now() + retry.attempt_timeout));
}

// One attempt. Requests are written while responses are read: either side alone would fill the
// flow-control window and stop.
absl::StatusOr<std::vector<v1::ComputeValuesResponse>> ComputeValuesOnce(
    v1::CriticService::Stub& stub, const RetryOptions& retry,
    const std::vector<v1::ComputeValuesRequest>& requests) {
  grpc::ClientContext context;
  SetDeadline(retry, &context);
  auto stream = stub.ComputeValues(&context);
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
  }
  if (too_many) context.TryCancel();
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
                                                    const RetryOptions& retry,
                                                    const v1::TrainStepHeader& header,
                                                    const std::vector<v1::ValueSample>& samples) {
  grpc::ClientContext context;
  SetDeadline(retry, &context);
  v1::TrainStepResponse response;
  auto stream = stub.TrainStep(&context, &response);
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
                           const RetryOptions& retry)
    : stub_(v1::CriticService::NewStub(channel)), retry_(retry) {}

absl::StatusOr<v1::GetServerInfoResponse> CriticClient::GetServerInfo() const {
  return CallWithRetry(retry_, [&]() -> absl::StatusOr<v1::GetServerInfoResponse> {
    grpc::ClientContext context;
    SetDeadline(retry_, &context);
    v1::GetServerInfoResponse response;
    TANDEM_RETURN_IF_ERROR(rpc::FromGrpcStatus(stub_->GetServerInfo(&context, {}, &response)));
    return response;
  });
}

absl::StatusOr<std::vector<v1::ComputeValuesResponse>> CriticClient::ComputeValues(
    const std::vector<v1::ComputeValuesRequest>& requests) const {
  TANDEM_ASSIGN_OR_RETURN(auto responses, CallWithRetry(retry_, [&] {
                            return ComputeValuesOnce(*stub_, retry_, requests);
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
    v1::TrainStepHeader header, const std::vector<v1::ValueSample>& samples) const {
  if (header.request_id().empty()) {
    return absl::InvalidArgumentError("header.request_id: is required");
  }
  header.set_num_samples(static_cast<int32_t>(samples.size()));
  return CallWithRetry(retry_, [&] { return TrainStepOnce(*stub_, retry_, header, samples); });
}

}  // namespace tandem::client
