#include "services/trainer/service/critic_connection.h"

#include <grpcpp/client_context.h>

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "common/base/errors/not_finite.h"
#include "common/base/errors/status_macros.h"
#include "common/rpc/calls/error_table.h"
#include "common/rpc/client/channel.h"
#include "common/rpc/convert/float_field.h"
#include "common/rpc/convert/proto_convert.h"
#include "common/rpc/transfer/blob_sender.h"
#include "tandem/blobs/v1/blobs.grpc.pb.h"
#include "tandem/critic/v1/critic.grpc.pb.h"

namespace tandem::trainer {
namespace {

using critic::v1::CriticService;

// Makes one attempt, and returns one response for each request, in order. Requests are written
// while responses are read: either side alone would fill the flow-control window and stop.
absl::StatusOr<std::vector<critic::v1::ComputeValuesResponse>> AskForValues(
    CriticService::Stub& stub, rpc::CallContext&& context,
    const std::vector<critic::v1::ComputeValuesRequest>& requests,
    const std::function<void()>& progress) {
  auto stream = stub.ComputeValues(context.get());
  std::vector<critic::v1::ComputeValuesResponse> responses;
  responses.reserve(requests.size() + 1);
  std::jthread writer([&] {
    for (const auto& request : requests) {
      if (!stream->Write(request)) return;
    }
    stream->WritesDone();
  });
  // If reading throws, the writer must not wait for a reader.
  absl::Cleanup cancel = [&] { context.get()->TryCancel(); };
  critic::v1::ComputeValuesResponse response;
  bool too_many = false;
  while (!too_many && stream->Read(&response)) {
    too_many = responses.size() == requests.size();
    responses.push_back(std::move(response));
    progress();
  }
  if (too_many) {
    std::move(cancel).Invoke();
  } else {
    std::move(cancel).Cancel();
  }
  writer.join();
  absl::Status status = rpc::FromGrpcStatus(stream->Finish());
  if (too_many || (status.ok() && responses.size() != requests.size())) {
    return absl::InternalError(absl::StrCat("the critic sent ", responses.size(), " answers to ",
                                            requests.size(), " requests"));
  }
  TANDEM_RETURN_IF_ERROR(status);
  return responses;
}

// Makes one attempt.
absl::StatusOr<critic::v1::TrainStepResponse> SendStep(
    CriticService::Stub& stub, rpc::CallContext&& context,
    const critic::v1::TrainStepHeader& header,
    const std::vector<critic::v1::ValueSample>& samples) {
  critic::v1::TrainStepResponse response;
  auto stream = stub.TrainStep(context.get(), &response);
  critic::v1::TrainStepRequest message;
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

// ComputeValuesRequest and ValueSample carry the tokens and images in the same fields.
template <typename Proto>
void SetSequence(const CriticConnection::Sequence& sequence, Proto* proto) {
  proto->mutable_prompt_token_ids()->Add(sequence.prompt_token_ids.begin(),
                                         sequence.prompt_token_ids.end());
  proto->mutable_response_token_ids()->Add(sequence.response_token_ids.begin(),
                                           sequence.response_token_ids.end());
  rpc::VisionInputsToProto(sequence.vision_inputs, proto->mutable_vision_inputs());
}

class GrpcCriticConnection final : public CriticConnection {
 public:
  GrpcCriticConnection(std::shared_ptr<grpc::ChannelInterface> channel,
                       const rpc::RetryOptions& retry)
      : stub_(CriticService::NewStub(channel)),
        blobs_(blobs::v1::BlobService::NewStub(channel)),
        retry_(retry) {}

  absl::StatusOr<Values> ComputeValues(const Call& call, const Step& step,
                                       const std::vector<Sequence>& sequences) override {
    std::vector<critic::v1::ComputeValuesRequest> requests(sequences.size());
    for (size_t i = 0; i < sequences.size(); ++i) {
      SetSequence(sequences[i], &requests[i]);
      requests[i].mutable_step()->set_run_id(step.run_id);
      requests[i].mutable_step()->set_request_id(step.request_id);
    }
    TANDEM_ASSIGN_OR_RETURN(const auto responses, WithRetry(call, [&] {
                              return AskForValues(
                                  *stub_, rpc::CallContext(call.scope, retry_.attempt_timeout),
                                  requests, call.progress);
                            }));
    Values out;
    for (size_t i = 0; i < responses.size(); ++i) {
      const WeightsVersion weights = rpc::WeightsVersionFromProto(responses[i].weights());
      if (i > 0 && weights.version != out.weights.version) {
        return absl::AbortedError(absl::StrCat("the critic's weights changed from version ",
                                               out.weights.version, " to ", weights.version,
                                               " while it computed values"));
      }
      out.weights = weights;
      const auto length = static_cast<int64_t>(sequences[i].response_token_ids.size());
      const std::string path = absl::StrCat("responses[", i, "]");
      auto values = rpc::FloatField("values", responses[i].values(), length);
      if (!values.ok()) return BadAnswer(path, values.status());
      auto final_value = rpc::FloatField("final_value", responses[i].final_value(), 1);
      if (!final_value.ok()) return BadAnswer(path, final_value.status());
      out.values.push_back(*std::move(values));
      out.final_values.push_back(final_value->front());
    }
    return out;
  }

  absl::StatusOr<std::map<std::string, double>> TrainStep(const Call& call,
                                                          const TrainRequest& request) override {
    critic::v1::TrainStepHeader header;
    header.set_run_id(request.step.run_id);
    header.set_step(request.step.step);
    header.set_request_id(request.step.request_id);
    header.set_expected_version(request.expected_version);
    header.set_defer_digest(true);  // the trainer asks for versions alone
    header.set_value_clip(request.value_clip);
    header.set_num_mini_batches(static_cast<int32_t>(request.updates.num_mini_batches));
    header.set_num_epochs(static_cast<int32_t>(request.updates.num_epochs));
    std::vector<critic::v1::ValueSample> samples(request.sequences.size());
    for (size_t i = 0; i < samples.size(); ++i) {
      SetSequence(request.sequences[i], &samples[i]);
      rpc::FloatsToProto(request.old_values[i], samples[i].mutable_old_values());
      rpc::FloatsToProto(request.returns[i], samples[i].mutable_returns());
      if (request.loss_masks.empty()) continue;
      samples[i].mutable_loss_mask()->assign(request.loss_masks[i].begin(),
                                             request.loss_masks[i].end());
    }
    header.set_num_samples(static_cast<int32_t>(samples.size()));
    TANDEM_ASSIGN_OR_RETURN(const auto response, WithRetry(call, [&] {
                              return SendStep(*stub_,
                                              rpc::CallContext(call.scope, retry_.attempt_timeout),
                                              header, samples);
                            }));
    call.progress();
    if (response.skipped()) {
      return NotFiniteError(absl::StrCat("the critic skipped the step: ", response.skip_reason()));
    }
    return std::map<std::string, double>(response.metrics().begin(), response.metrics().end());
  }

 private:
  // Makes a call, uploads the images that the critic lacks before it, and repeats both if a failure
  // may pass.
  template <typename Attempt>
  auto WithRetry(const Call& call, Attempt attempt) -> decltype(attempt()) {
    return rpc::CallWithRetry(retry_, call.scope, [&] {
      return rpc::CallWithBlobs(call.scope, retry_.attempt_timeout, call.blobs, *blobs_, attempt);
    });
  }

  // INTERNAL: a wrong answer of the critic is not the fault of the trainer's caller.
  static absl::Status BadAnswer(const std::string& path, const absl::Status& status) {
    return absl::InternalError(
        absl::StrCat("the critic's answer is malformed: ", path, ".", status.message()));
  }

  const std::unique_ptr<CriticService::Stub> stub_;
  const std::unique_ptr<blobs::v1::BlobService::Stub> blobs_;
  const rpc::RetryOptions retry_;
};

}  // namespace

std::shared_ptr<CriticConnection> MakeCriticConnection(
    std::shared_ptr<grpc::ChannelInterface> channel, const rpc::RetryOptions& retry) {
  return std::make_shared<GrpcCriticConnection>(std::move(channel), retry);
}

}  // namespace tandem::trainer
