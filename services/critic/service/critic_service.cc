#include "services/critic/service/critic_service.h"

#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/errors/error.h"
#include "common/base/errors/status_macros.h"
#include "common/rpc/calls/stream_handlers.h"
#include "common/rpc/calls/unary_handler.h"
#include "common/rpc/metrics/phase_timer.h"
#include "services/critic/service/convert.h"
#include "services/training_core/service/sequence_batch_stream.h"
#include "services/training_core/service/train_step_stream.h"

namespace tandem::critic {

CriticService::CriticService(const training::ServiceOptions& options,
                             const rpc::ServerRuntime& runtime)
    : training_(options, runtime) {}

grpc::ServerUnaryReactor* CriticService::GetServerInfo(grpc::CallbackServerContext* context,
                                                       const grpc::ByteBuffer* request,
                                                       grpc::ByteBuffer* response) {
  return rpc::AnswerAtOnce<v1::GetServerInfoRequest, v1::GetServerInfoResponse>(
      training_.executor(), context, request, response,
      [this](const v1::GetServerInfoRequest&) -> absl::StatusOr<v1::GetServerInfoResponse> {
        v1::GetServerInfoResponse out;
        *out.mutable_server() = training_.ServerInfo();
        out.set_value_head_initialized_from(engine_->value_head_from_checkpoint()
                                                ? v1::VALUE_HEAD_SOURCE_CHECKPOINT
                                                : v1::VALUE_HEAD_SOURCE_RANDOM);
        const int64_t updates = engine_->Info().optimizer_steps;
        out.set_optimizer_steps(updates);
        *out.mutable_optimizer() =
            training::DescribeOptimizer(training_.options().optimizer, updates);
        out.set_unsaved(engine_->unsaved());
        return out;
      });
}

grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* CriticService::ComputeValues(
    grpc::CallbackServerContext* context) {
  using Stream = training::SequenceBatchStream<v1::ComputeValuesRequest, v1::ComputeValuesResponse,
                                               ValuesRequest, ValuesResult>;
  return rpc::HandleBatchStream<v1::ComputeValuesRequest, v1::ComputeValuesResponse>(
      training_.executor(), context,
      std::make_unique<Stream>(
          training_, Stream::Convert{&FromProto}, Stream::ConvertBack{&ToProto},
          [this](const CallScope& call, const std::vector<ValuesRequest>& requests) {
            return engine_->ComputeValues(call, {requests});
          }));
}

// ---------------------------------------------------------------------------------------------
// TrainStep

class CriticService::TrainStepCall final
    : public rpc::TrainStepStream<v1::TrainStepRequest, v1::TrainStepResponse> {
 public:
  explicit TrainStepCall(CriticService& service)
      : TrainStepStream(service.training_.budget()), service_(service) {}

 private:
  absl::StatusOr<int64_t> OnHeader(const v1::TrainStepHeader& proto) override {
    TANDEM_ASSIGN_OR_RETURN(request_, FromProto(proto, service_.training_.options().max_samples));
    return proto.num_samples();
  }
  absl::StatusOr<bool> OnSample(const v1::TrainStepRequest& message) override {
    if (!message.has_sample()) return InvalidField("sample", "is required");
    TANDEM_ASSIGN_OR_RETURN(ValueSample sample, FromProto(message.sample()));
    TANDEM_RETURN_IF_ERROR(
        service_.training_.blobs().Collect(sample.vision_inputs, request_.blobs));
    request_.samples.push_back(std::move(sample));
    return true;
  }
  absl::StatusOr<v1::TrainStepResponse> OnComplete(std::string payload_digest,
                                                   const CallScope& call) override {
    request_.payload_digest = std::move(payload_digest);
    int64_t tokens = 0;
    for (const ValueSample& sample : request_.samples) {
      tokens += static_cast<int64_t>(sample.response_token_ids.size());
    }
    const absl::StatusOr<StepResult> result = service_.training_.RunStep(
        request_, [&](const StepReport&) { return tokens; },
        [&] { return service_.engine_->TrainStep(call, request_); });
    if (!result.ok()) return rpc::WithRequestPath(result.status());
    return ToProto(*result);
  }

  CriticService& service_;
  TrainStepRequest request_;
};

grpc::ServerReadReactor<grpc::ByteBuffer>* CriticService::TrainStep(
    grpc::CallbackServerContext* context, grpc::ByteBuffer* response) {
  return rpc::HandleClientStream<v1::TrainStepRequest, v1::TrainStepResponse>(
      training_.executor(), context, response, std::make_unique<TrainStepCall>(*this));
}

// ---------------------------------------------------------------------------------------------
// Checkpoints

grpc::ServerUnaryReactor* CriticService::SaveCheckpoint(grpc::CallbackServerContext* context,
                                                        const grpc::ByteBuffer* request,
                                                        grpc::ByteBuffer* response) {
  return training_.HandleSave<v1::SaveCheckpointRequest, v1::SaveCheckpointResponse>(
      context, request, response);
}

grpc::ServerUnaryReactor* CriticService::LoadCheckpoint(grpc::CallbackServerContext* context,
                                                        const grpc::ByteBuffer* request,
                                                        grpc::ByteBuffer* response) {
  return training_.HandleLoad<v1::LoadCheckpointRequest, v1::LoadCheckpointResponse>(
      context, request, response);
}

grpc::ServerUnaryReactor* CriticService::ExportModel(grpc::CallbackServerContext* context,
                                                     const grpc::ByteBuffer* request,
                                                     grpc::ByteBuffer* response) {
  return training_.HandleExport<v1::ExportModelRequest, v1::ExportModelResponse>(context, request,
                                                                                 response);
}

}  // namespace tandem::critic
