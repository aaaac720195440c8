#include "services/critic/service/critic_service.h"

#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/logging.h"
#include "common/base/status_macros.h"
#include "common/rpc/checkpoint_calls.h"
#include "common/rpc/phase_timer.h"
#include "common/rpc/proto_convert.h"
#include "common/rpc/server_main.h"
#include "common/rpc/stream_handlers.h"
#include "common/rpc/train_step_stream.h"
#include "common/rpc/unary_handler.h"
#include "services/critic/service/convert.h"

namespace tandem::critic {

CriticService::CriticService(const CriticServiceOptions& options, rpc::CallExecutor& executor,
                             rpc::Metrics& metrics)
    : options_(options),
      executor_(executor),
      metrics_(metrics),
      budget_(options.max_buffered_bytes) {
  // Counters and gauges that alerts read exist from the start.
  for (const char* result : {"applied", "replayed", "failed"}) {
    metrics_.Counter(rpc::metric::kTrainSteps, {result});
  }
  metrics_.Counter(rpc::metric::kTrainedTokens);
  metrics_.Gauge(rpc::metric::kCheckpointTime);
  metrics_.Gauge(rpc::metric::kCheckpointBytes);
  metrics_.Gauge(rpc::metric::kLastProgress);
}

void CriticService::UpdateMetrics() {
  const EngineInfo info = engine_->Info();
  metrics_.Gauge(rpc::metric::kWeightsVersion).Set(static_cast<double>(info.weights.version));
  metrics_.Gauge(rpc::metric::kOptimizerSteps).Set(static_cast<double>(info.optimizer_steps));
}

grpc::ServerUnaryReactor* CriticService::GetServerInfo(grpc::CallbackServerContext* context,
                                                       const v1::GetServerInfoRequest*,
                                                       v1::GetServerInfoResponse* response) {
  return rpc::AnswerAtOnce<v1::GetServerInfoResponse>(
      executor_, context, response, [this]() -> absl::StatusOr<v1::GetServerInfoResponse> {
        const EngineInfo info = engine_->Info();
        v1::GetServerInfoResponse out;
        types::v1::ServerInfo& server = *out.mutable_server();
        server.set_role("critic");
        server.set_software_version(rpc::SoftwareVersion());
        server.set_uptime_seconds(absl::ToDoubleSeconds(absl::Now() - options_.start_time));
        rpc::WeightsVersionToProto(info.weights, server.mutable_weights());
        rpc::ModelSummaryToProto(info.model, server.mutable_model());
        out.set_value_head_initialized_from(info.value_head_from_checkpoint
                                                ? v1::VALUE_HEAD_SOURCE_CHECKPOINT
                                                : v1::VALUE_HEAD_SOURCE_RANDOM);
        out.set_optimizer_steps(info.optimizer_steps);
        return out;
      });
}

grpc::ServerBidiReactor<v1::ComputeValuesRequest, v1::ComputeValuesResponse>*
CriticService::ComputeValues(grpc::CallbackServerContext* context) {
  const auto count = std::make_shared<int64_t>(0);  // requests are handled one after the other
  return rpc::HandleMapStream<v1::ComputeValuesRequest, v1::ComputeValuesResponse>(
      executor_, context,
      [this, count](const v1::ComputeValuesRequest& proto,
                    const rpc::CallContext& context) -> absl::StatusOr<v1::ComputeValuesResponse> {
        const std::string path = absl::StrCat("requests[", (*count)++, "]");
        const auto request = FromProto(proto);
        if (!request.ok()) return PrependFieldPath(path, request.status());
        const auto result = turn_.Run(context, [&] {
          const rpc::PhaseTimer timer(metrics_, "evaluate");
          return engine_->ComputeValues(*request);
        });
        if (!result.ok()) return PrependFieldPath(path, result.status());
        metrics_.Gauge(rpc::metric::kLastProgress).SetToCurrentTime();
        return ToProto(*result);
      });
}

// ---------------------------------------------------------------------------------------------
// TrainStep

class CriticService::TrainStepCall final
    : public rpc::TrainStepStream<v1::TrainStepRequest, v1::TrainStepResponse> {
 public:
  explicit TrainStepCall(CriticService& service)
      : TrainStepStream(service.budget_), service_(service) {}

 private:
  absl::StatusOr<int64_t> OnHeader(const v1::TrainStepHeader& proto) override {
    TANDEM_ASSIGN_OR_RETURN(request_, FromProto(proto, service_.options_.max_samples));
    return proto.num_samples();
  }
  absl::Status OnSample(const v1::TrainStepRequest& message) override {
    if (!message.has_sample()) return InvalidField("sample", "is required");
    TANDEM_ASSIGN_OR_RETURN(ValueSample sample, FromProto(message.sample()));
    request_.samples.push_back(std::move(sample));
    return absl::OkStatus();
  }
  absl::StatusOr<v1::TrainStepResponse> OnComplete(const rpc::CallContext& context) override {
    return service_.RunTrainStep(request_, context);
  }

  CriticService& service_;
  TrainStepRequest request_;
};

grpc::ServerReadReactor<v1::TrainStepRequest>* CriticService::TrainStep(
    grpc::CallbackServerContext* context, v1::TrainStepResponse* response) {
  return rpc::HandleClientStream<v1::TrainStepRequest, v1::TrainStepResponse>(
      executor_, context, response, std::make_unique<TrainStepCall>(*this));
}

absl::StatusOr<v1::TrainStepResponse> CriticService::RunTrainStep(const TrainStepRequest& request,
                                                                  const rpc::CallContext& context) {
  double seconds = 0;
  const absl::StatusOr<TrainStepResult> result = turn_.Run(context, [&] {
    rpc::PhaseTimer timer(metrics_, "train");
    auto result = engine_->TrainStep(request);
    seconds = timer.Stop();
    return result;
  });
  if (!result.ok()) {
    metrics_.Counter(rpc::metric::kTrainSteps, {"failed"}).Increment();
    Log(LogLevel::kWarning, "train_step_failed",
        {{"run_id", request.run_id},
         {"step", request.step},
         {"error", result.status().ToString()}});
    return rpc::WithRequestPath(result.status());
  }
  if (result->replayed) {
    metrics_.Counter(rpc::metric::kTrainSteps, {"replayed"}).Increment();
    return ToProto(*result);
  }
  UpdateMetrics();
  size_t tokens = 0;
  for (const ValueSample& sample : request.samples) tokens += sample.response_token_ids.size();
  metrics_.Counter(rpc::metric::kTrainSteps, {"applied"}).Increment();
  metrics_.Counter(rpc::metric::kTrainedTokens).Increment(static_cast<double>(tokens));
  metrics_.Gauge(rpc::metric::kLastProgress).SetToCurrentTime();
  metrics_.SetReport(result->metrics);
  Log(LogLevel::kInfo, "train_step",
      {{"run_id", request.run_id},
       {"step", result->step},
       {"version", result->weights.version},
       {"seconds", seconds}});
  return ToProto(*result);
}

// ---------------------------------------------------------------------------------------------
// Checkpoints

grpc::ServerUnaryReactor* CriticService::SaveCheckpoint(grpc::CallbackServerContext* context,
                                                        const v1::SaveCheckpointRequest* request,
                                                        v1::SaveCheckpointResponse* response) {
  return rpc::HandleUnary<v1::SaveCheckpointRequest, v1::SaveCheckpointResponse>(
      executor_, context, request, response, [this](const auto& request, const auto& context) {
        return rpc::SaveCheckpoint<v1::SaveCheckpointResponse>(*engine_, turn_, metrics_, request,
                                                               context);
      });
}

grpc::ServerUnaryReactor* CriticService::LoadCheckpoint(grpc::CallbackServerContext* context,
                                                        const v1::LoadCheckpointRequest* request,
                                                        v1::LoadCheckpointResponse* response) {
  return rpc::HandleUnary<v1::LoadCheckpointRequest, v1::LoadCheckpointResponse>(
      executor_, context, request, response,
      [this](const v1::LoadCheckpointRequest& request,
             const rpc::CallContext& context) -> absl::StatusOr<v1::LoadCheckpointResponse> {
        TANDEM_RETURN_IF_ERROR(rpc::LoadCheckpoint(*engine_, turn_, metrics_, request, context));
        UpdateMetrics();
        const EngineInfo info = engine_->Info();
        v1::LoadCheckpointResponse out;
        rpc::WeightsVersionToProto(info.weights, out.mutable_weights());
        out.set_optimizer_steps(info.optimizer_steps);
        return out;
      });
}

grpc::ServerUnaryReactor* CriticService::ExportModel(grpc::CallbackServerContext* context,
                                                     const v1::ExportModelRequest* request,
                                                     v1::ExportModelResponse* response) {
  return rpc::HandleUnary<v1::ExportModelRequest, v1::ExportModelResponse>(
      executor_, context, request, response, [this](const auto& request, const auto& context) {
        return rpc::ExportModel<v1::ExportModelResponse>(*engine_, turn_, metrics_, request,
                                                         context);
      });
}

}  // namespace tandem::critic
