#include "services/critic/service/critic_service.h"

#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/logging.h"
#include "common/base/status_macros.h"
#include "common/rpc/checkpoint_fields.h"
#include "common/rpc/phase_timer.h"
#include "common/rpc/proto_convert.h"
#include "common/rpc/server_main.h"
#include "common/rpc/stream_handlers.h"
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

void CriticService::SetEngine(Engine* engine) {
  engine_ = engine;
  RefreshInfo();
}

EngineInfo CriticService::Info() const {
  std::lock_guard lock(info_mutex_);
  return info_;
}

void CriticService::RefreshInfo() {
  EngineInfo info = engine_->Info();
  std::lock_guard lock(info_mutex_);
  info_ = std::move(info);
}

void CriticService::UpdateMetrics() {
  const EngineInfo info = Info();
  metrics_.Gauge(rpc::metric::kPolicyVersion).Set(static_cast<double>(info.version));
  metrics_.Gauge(rpc::metric::kOptimizerSteps).Set(static_cast<double>(info.optimizer_steps));
}

grpc::ServerUnaryReactor* CriticService::GetServerInfo(grpc::CallbackServerContext* context,
                                                       const v1::GetServerInfoRequest* request,
                                                       v1::GetServerInfoResponse* response) {
  return rpc::HandleUnary<v1::GetServerInfoRequest, v1::GetServerInfoResponse>(
      executor_, context, request, response,
      [this](const v1::GetServerInfoRequest&,
             const rpc::CallContext&) -> absl::StatusOr<v1::GetServerInfoResponse> {
        const EngineInfo info = Info();
        v1::GetServerInfoResponse out;
        types::v1::ServerInfo& server = *out.mutable_server();
        server.set_role("critic");
        server.set_software_version(rpc::SoftwareVersion());
        server.set_uptime_seconds(absl::ToDoubleSeconds(absl::Now() - options_.start_time));
        server.set_policy_version(info.version);
        server.set_weights_digest(info.weights_digest);
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

// Collects one step. Every sample is checked as it comes, so a bad one is refused before the rest
// is sent.
class CriticService::TrainStepCall final
    : public rpc::ClientStreamHandler<v1::TrainStepRequest, v1::TrainStepResponse> {
 public:
  explicit TrainStepCall(CriticService& service) : service_(service), share_(service.budget_) {}

  absl::Status OnMessage(v1::TrainStepRequest&& message) override {
    if (message.has_header()) return OnHeader(message.header());
    if (!has_header_) return InvalidField("header", "must be the first message");
    const std::string path = absl::StrCat("samples[", request_.samples.size(), "]");
    if (received() == num_samples_) {
      return InvalidField("header.num_samples",
                          absl::StrCat(num_samples_, " samples were announced, more came"));
    }
    if (!message.has_sample()) return InvalidField(path, "is required");
    absl::Status taken = share_.Take(static_cast<int64_t>(message.SpaceUsedLong()));
    if (!taken.ok()) return PrependFieldPath(path, taken);
    auto sample = FromProto(message.sample());
    if (!sample.ok()) return PrependFieldPath(path, sample.status());
    request_.samples.push_back(*std::move(sample));
    return absl::OkStatus();
  }

  absl::StatusOr<v1::TrainStepResponse> OnEnd(const rpc::CallContext& context) override {
    if (!has_header_) return InvalidField("header", "is required");
    if (received() != num_samples_) {
      return InvalidField(
          "header.num_samples",
          absl::StrCat(num_samples_, " samples were announced, only ", received(), " came"));
    }
    return service_.RunTrainStep(request_, context);
  }

 private:
  absl::Status OnHeader(const v1::TrainStepHeader& proto) {
    if (has_header_) return InvalidField("header", "came twice");
    auto request = FromProto(proto, service_.options_.max_samples);
    if (!request.ok()) return PrependFieldPath("header", request.status());
    has_header_ = true;
    num_samples_ = proto.num_samples();
    request_ = *std::move(request);
    return absl::OkStatus();
  }
  int64_t received() const { return static_cast<int64_t>(request_.samples.size()); }

  CriticService& service_;
  rpc::ByteBudget::Share share_;
  bool has_header_ = false;
  int64_t num_samples_ = 0;
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
    return result.status();
  }
  if (result->replayed) {
    metrics_.Counter(rpc::metric::kTrainSteps, {"replayed"}).Increment();
    return ToProto(*result);
  }
  RefreshInfo();
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
       {"version", result->version},
       {"seconds", seconds}});
  return ToProto(*result);
}

// ---------------------------------------------------------------------------------------------
// Checkpoints

grpc::ServerUnaryReactor* CriticService::SaveCheckpoint(grpc::CallbackServerContext* context,
                                                        const v1::SaveCheckpointRequest* request,
                                                        v1::SaveCheckpointResponse* response) {
  return rpc::HandleUnary<v1::SaveCheckpointRequest, v1::SaveCheckpointResponse>(
      executor_, context, request, response,
      [this](const v1::SaveCheckpointRequest& request,
             const rpc::CallContext& context) -> absl::StatusOr<v1::SaveCheckpointResponse> {
        TANDEM_RETURN_IF_ERROR(
            rpc::CheckSaveFields(request.directory(), request.name(), request.keep()));
        TANDEM_ASSIGN_OR_RETURN(const CheckpointResult result, turn_.Run(context, [&] {
          const rpc::PhaseTimer timer(metrics_, "save");
          return engine_->SaveCheckpoint(request.directory(), request.name(), request.keep());
        }));
        metrics_.Gauge(rpc::metric::kCheckpointTime).SetToCurrentTime();
        metrics_.Gauge(rpc::metric::kCheckpointBytes).Set(static_cast<double>(result.bytes));
        Log(LogLevel::kInfo, "checkpoint_saved", {{"path", result.path}, {"bytes", result.bytes}});
        v1::SaveCheckpointResponse out;
        out.set_path(result.path);
        out.set_bytes(result.bytes);
        return out;
      });
}

grpc::ServerUnaryReactor* CriticService::LoadCheckpoint(grpc::CallbackServerContext* context,
                                                        const v1::LoadCheckpointRequest* request,
                                                        v1::LoadCheckpointResponse* response) {
  return rpc::HandleUnary<v1::LoadCheckpointRequest, v1::LoadCheckpointResponse>(
      executor_, context, request, response,
      [this](const v1::LoadCheckpointRequest& request,
             const rpc::CallContext& context) -> absl::StatusOr<v1::LoadCheckpointResponse> {
        TANDEM_RETURN_IF_ERROR(rpc::CheckPath("path", request.path()));
        TANDEM_RETURN_IF_ERROR(turn_.Run(context, [&] {
          const rpc::PhaseTimer timer(metrics_, "load");
          return engine_->LoadCheckpoint(request.path());
        }));
        RefreshInfo();
        UpdateMetrics();
        const EngineInfo info = Info();
        Log(LogLevel::kInfo, "checkpoint_loaded",
            {{"path", request.path()}, {"version", info.version}});
        v1::LoadCheckpointResponse out;
        out.set_version(info.version);
        out.set_optimizer_steps(info.optimizer_steps);
        return out;
      });
}

grpc::ServerUnaryReactor* CriticService::ExportModel(grpc::CallbackServerContext* context,
                                                     const v1::ExportModelRequest* request,
                                                     v1::ExportModelResponse* response) {
  return rpc::HandleUnary<v1::ExportModelRequest, v1::ExportModelResponse>(
      executor_, context, request, response,
      [this](const v1::ExportModelRequest& request,
             const rpc::CallContext& context) -> absl::StatusOr<v1::ExportModelResponse> {
        TANDEM_RETURN_IF_ERROR(rpc::CheckPath("path", request.path()));
        TANDEM_ASSIGN_OR_RETURN(const DType dtype, rpc::ExportDType(request.dtype()));
        TANDEM_RETURN_IF_ERROR(turn_.Run(context, [&] {
          const rpc::PhaseTimer timer(metrics_, "export");
          return engine_->ExportModel(request.path(), dtype);
        }));
        v1::ExportModelResponse out;
        out.set_path(request.path());
        return out;
      });
}

}  // namespace tandem::critic
