#include "services/trainer/service/trainer_service.h"

#include <memory>
#include <set>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/base/errors/error.h"
#include "common/base/errors/status_macros.h"
#include "common/base/logging.h"
#include "common/rpc/calls/error_table.h"
#include "common/rpc/calls/unary_handler.h"
#include "common/rpc/convert/proto_convert.h"
#include "common/rpc/metrics/phase_timer.h"
#include "services/trainer/service/convert.h"
#include "services/trainer/service/objective_convert.h"
#include "services/trainer/service/publish.h"
#include "services/training_core/service/sequence_batch_stream.h"
#include "services/training_core/service/train_step_stream.h"

namespace tandem::trainer {
namespace {

// Returns a metric of a step's report, or 0 if the report lacks it.
double Reported(const StepReport& report, const char* name) {
  const auto found = report.metrics.find(name);
  return found == report.metrics.end() ? 0 : found->second;
}

// Says in the result of a publication, and in the log, whether the receiver drafts with the
// trainer's speculator.
void ReportSpeculator(bool served, v1::PublishResult& result) {
  result.set_speculator(served ? v1::SPECULATOR_DELIVERY_SERVED : v1::SPECULATOR_DELIVERY_UNUSED);
  if (served) return;
  Log(LogLevel::kWarning, "speculator_unused",
      {{"target", result.target()}, {"reason", "the server has no senior.speculator"}});
}

// Sets the gauges of the accuracies of a speculator's heads, if the step has trained one.
void ReportHeads(const StepReport& report, rpc::Metrics& metrics) {
  for (int head = 0;; ++head) {
    const auto found = report.metrics.find(absl::StrCat("speculator/head_", head, "_accuracy"));
    if (found == report.metrics.end()) return;
    metrics.Gauge(rpc::metric::kSpeculatorAccuracy, {absl::StrCat(head)}).Set(found->second);
  }
}

}  // namespace

TrainerService::TrainerService(const TrainerServiceOptions& options,
                               const rpc::ServerRuntime& runtime)
    : options_(options),
      executor_(runtime.executor),
      metrics_(runtime.metrics),
      training_(options, runtime) {
  for (const char* result : {"ok", "failed"}) {
    metrics_.Counter(rpc::metric::kPublishResults, {result});
  }
  metrics_.Counter(rpc::metric::kWeightBytesSent);
  metrics_.Counter(rpc::metric::kDroppedSamples);
}

grpc::ServerUnaryReactor* TrainerService::GetServerInfo(grpc::CallbackServerContext* context,
                                                        const grpc::ByteBuffer* request,
                                                        grpc::ByteBuffer* response) {
  return rpc::AnswerAtOnce<v1::GetServerInfoRequest, v1::GetServerInfoResponse>(
      executor_, context, request, response,
      [this](const v1::GetServerInfoRequest&) -> absl::StatusOr<v1::GetServerInfoResponse> {
        v1::GetServerInfoResponse out;
        *out.mutable_server() = training_.ServerInfo();
        const training::EngineInfo info = engine_->Info();
        out.set_optimizer_steps(info.optimizer_steps);
        out.set_micro_batch_tokens(static_cast<int32_t>(options_.micro_batch_tokens));
        out.set_critic_address(options_.critic_address);
        out.set_unsaved(engine_->unsaved());
        out.set_micro_batches(info.micro_batches);
        out.set_micro_batches_done(info.micro_batches_done);
        out.set_max_samples(static_cast<int32_t>(options_.max_samples));
        out.set_has_speculator(options_.has_speculator);
        if (!options_.freezes_model) {
          *out.mutable_optimizer() =
              training::DescribeOptimizer(options_.optimizer, info.optimizer_steps);
        }
        if (options_.has_speculator) {
          *out.mutable_speculator_optimizer() =
              training::DescribeOptimizer(options_.speculator_optimizer, info.companion_updates);
        }
        return out;
      });
}

// ---------------------------------------------------------------------------------------------
// TrainStep

class TrainerService::TrainStepCall final
    : public rpc::TrainStepStream<v1::TrainStepRequest, v1::TrainStepResponse> {
 public:
  explicit TrainStepCall(TrainerService& service)
      : TrainStepStream(service.training_.budget()), service_(service) {}

 private:
  absl::StatusOr<int64_t> OnHeader(const v1::TrainStepHeader& proto) override {
    TANDEM_ASSIGN_OR_RETURN(
        request_, FromProto(proto, service_.options_.max_samples, service_.options_.support));
    return proto.num_samples();
  }
  absl::StatusOr<bool> OnSample(const v1::TrainStepRequest& message) override {
    return std::visit([&](auto& batch) { return Add(message, batch); }, request_.batch);
  }
  absl::StatusOr<v1::TrainStepResponse> OnComplete(std::string payload_digest,
                                                   const CallScope& call) override {
    request_.payload_digest = std::move(payload_digest);
    return service_.RunTrainStep(request_, call);
  }

  absl::StatusOr<bool> Add(const v1::TrainStepRequest& message, PolicyBatch& batch) {
    if (message.has_routed_experts_part()) {
      routed_experts_part_.append(message.routed_experts_part());
      return false;
    }
    if (!message.has_policy_sample()) {
      return InvalidField("policy_sample", "is required with a policy objective");
    }
    TANDEM_ASSIGN_OR_RETURN(PolicySample sample, FromProto(WithParts(message.policy_sample())));
    TANDEM_RETURN_IF_ERROR(PrependFieldPath(
        "trajectory",
        service_.training_.blobs().Collect(sample.trajectory.vision_inputs, request_.blobs)));
    batch.samples.push_back(std::move(sample));
    return true;
  }
  absl::StatusOr<bool> Add(const v1::TrainStepRequest& message, SupervisedBatch& batch) {
    if (!message.has_supervised_sample()) {
      return InvalidField("supervised_sample", "is required with a supervised objective");
    }
    TANDEM_ASSIGN_OR_RETURN(SupervisedSample sample, FromProto(message.supervised_sample()));
    TANDEM_RETURN_IF_ERROR(
        service_.training_.blobs().Collect(sample.vision_inputs, request_.blobs));
    batch.samples.push_back(std::move(sample));
    return true;
  }

  // Returns the sample with what came before it.
  v1::PolicySample WithParts(v1::PolicySample sample) {
    if (routed_experts_part_.empty()) return sample;
    std::string* rest = sample.mutable_trajectory()->mutable_routed_experts()->mutable_data();
    *rest = std::exchange(routed_experts_part_, {}) + *rest;
    return sample;
  }

  TrainerService& service_;
  TrainStepRequest request_;
  std::string routed_experts_part_;  // of the sample that comes next
};

grpc::ServerReadReactor<grpc::ByteBuffer>* TrainerService::TrainStep(
    grpc::CallbackServerContext* context, grpc::ByteBuffer* response) {
  return rpc::HandleClientStream<v1::TrainStepRequest, v1::TrainStepResponse>(
      executor_, context, response, std::make_unique<TrainStepCall>(*this));
}

absl::StatusOr<v1::TrainStepResponse> TrainerService::RunTrainStep(const TrainStepRequest& request,
                                                                   const CallScope& call) {
  const auto num_tokens = [](const StepReport& report) {
    return static_cast<int64_t>(Reported(report, "tokens/response"));
  };
  const absl::StatusOr<StepResult> result =
      training_.RunStep(request, num_tokens, [&] { return engine_->TrainStep(call, request); });
  if (!result.ok()) return rpc::WithRequestPath(result.status());
  v1::TrainStepResponse response;
  *response.mutable_report() = ToProto(result->report);
  response.set_replayed(result->replayed);
  response.set_critic_seconds(result->critic_seconds);
  if (!result->replayed) {
    metrics_.Counter(rpc::metric::kDroppedSamples)
        .Increment(Reported(result->report, "policy/dropped_samples"));
    ReportHeads(result->report, metrics_);
    v1::WatchStepsResponse event;
    *event.mutable_report() = response.report();
    watchers_.Publish(event);
  }
  return response;
}

grpc::ServerWriteReactor<grpc::ByteBuffer>* TrainerService::WatchSteps(
    grpc::CallbackServerContext* context, const grpc::ByteBuffer* request) {
  return watchers_.Add(executor_, context, request);
}

// ---------------------------------------------------------------------------------------------
// Other methods

grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* TrainerService::ComputeLogProbs(
    grpc::CallbackServerContext* context) {
  using Stream =
      training::SequenceBatchStream<v1::ComputeLogProbsRequest, v1::ComputeLogProbsResponse,
                                    LogProbsRequest, LogProbsResult>;
  return rpc::HandleBatchStream<v1::ComputeLogProbsRequest, v1::ComputeLogProbsResponse>(
      executor_, context,
      std::make_unique<Stream>(
          training_, Stream::Convert{&FromProto}, Stream::ConvertBack{&ToProto},
          [this](const CallScope& call, const std::vector<LogProbsRequest>& requests) {
            return engine_->ComputeLogProbs(call, {requests});
          }));
}

grpc::ServerUnaryReactor* TrainerService::PublishWeights(grpc::CallbackServerContext* context,
                                                         const grpc::ByteBuffer* request,
                                                         grpc::ByteBuffer* response) {
  return rpc::HandleUnary<v1::PublishWeightsRequest, v1::PublishWeightsResponse>(
      executor_, context, request, response,
      [this](const auto& request, const auto& call) { return Publish(request, call); });
}

absl::StatusOr<v1::PublishWeightsResponse> TrainerService::Publish(
    const v1::PublishWeightsRequest& request, const CallScope& call) {
  const std::vector<std::string> targets(request.targets().begin(), request.targets().end());
  TANDEM_RETURN_IF_ERROR(CheckTargets(targets));
  const rpc::PhaseTimer timer(metrics_, "publish");
  const Receivers receivers(targets, options_.publish_channel);
  std::set<TensorTypes> types;
  bool on_gpu = true;  // where all of them read it: the file is for the others
  const std::vector<absl::StatusOr<rpc::WantedWeights>> wanted = receivers.AskWanted(call);
  for (const auto& answer : wanted) {
    if (!answer.ok()) continue;
    types.insert(answer->types);
    on_gpu &= answer->reads_gpu_memory;
  }
  TANDEM_ASSIGN_OR_RETURN(
      const auto source,
      engine_->Snapshot(call, {.receivers = {types.begin(), types.end()},
                               .on_gpu = on_gpu && !types.empty() && gpu_memory_is_read_}));
  const std::vector<absl::StatusOr<rpc::SentWeights>> deliveries =
      receivers.Send(*source, request.allow_rollback(), call);
  if (!source->gpu_memories().empty()) NoteWhetherRead(wanted, deliveries);
  v1::PublishWeightsResponse response;
  response.mutable_weights()->set_version(source->manifest().version);
  response.mutable_weights()->set_digest(source->manifest().digest);
  response.set_bytes(source->manifest().float32_bytes());
  for (size_t i = 0; i < targets.size(); ++i) {
    const absl::StatusOr<rpc::SentWeights>& delivery = deliveries[i];
    v1::PublishResult& result = *response.add_results();
    result.set_target(targets[i]);
    *result.mutable_status() = rpc::ToRpcStatus(delivery.status());
    if (delivery.ok()) {
      result.set_digest(delivery->weights.digest);
      result.set_bytes(delivery->bytes);
      metrics_.Counter(rpc::metric::kWeightBytesSent)
          .Increment(static_cast<double>(delivery->bytes));
      if (source->manifest().Find(kSpeculatorComponent) != nullptr) {
        ReportSpeculator(delivery->components.contains(kSpeculatorComponent), result);
      }
    } else {
      Log(LogLevel::kWarning, "publish_failed",
          {{"target", targets[i]},
           {"version", response.weights().version()},
           {"error", delivery.status().ToString()}});
    }
    metrics_.Counter(rpc::metric::kPublishResults, {delivery.ok() ? "ok" : "failed"}).Increment();
  }
  return response;
}

void TrainerService::NoteWhetherRead(
    const std::vector<absl::StatusOr<rpc::WantedWeights>>& wanted,
    const std::vector<absl::StatusOr<rpc::SentWeights>>& deliveries) {
  using Transport = rpc::SentWeights::Transport;
  bool streamed = false;  // to one of this machine
  for (size_t i = 0; i < deliveries.size(); ++i) {
    const absl::StatusOr<rpc::SentWeights>& delivery = deliveries[i];
    if (!delivery.ok() || delivery->bytes == 0) continue;
    if (delivery->transport == Transport::kGpu) return;
    streamed |= wanted[i].ok() && wanted[i]->reads_gpu_memory;
  }
  if (!streamed || !gpu_memory_is_read_.exchange(false)) return;
  Log(LogLevel::kWarning, "gpu_memory_not_read",
      {{"message",
        "no rollout server on this machine could open the weights in the GPU's memory: they are "
        "copied to a file from now on"}});
}

grpc::ServerUnaryReactor* TrainerService::SaveCheckpoint(grpc::CallbackServerContext* context,
                                                         const grpc::ByteBuffer* request,
                                                         grpc::ByteBuffer* response) {
  return training_.HandleSave<v1::SaveCheckpointRequest, v1::SaveCheckpointResponse>(
      context, request, response);
}

grpc::ServerUnaryReactor* TrainerService::LoadCheckpoint(grpc::CallbackServerContext* context,
                                                         const grpc::ByteBuffer* request,
                                                         grpc::ByteBuffer* response) {
  return training_.HandleLoad<v1::LoadCheckpointRequest, v1::LoadCheckpointResponse>(
      context, request, response);
}

grpc::ServerUnaryReactor* TrainerService::ExportModel(grpc::CallbackServerContext* context,
                                                      const grpc::ByteBuffer* request,
                                                      grpc::ByteBuffer* response) {
  return training_.HandleExport<v1::ExportModelRequest, v1::ExportModelResponse>(context, request,
                                                                                 response);
}

grpc::ServerUnaryReactor* TrainerService::CheckObjective(grpc::CallbackServerContext* context,
                                                         const grpc::ByteBuffer* request,
                                                         grpc::ByteBuffer* response) {
  return rpc::AnswerAtOnce<v1::CheckObjectiveRequest, v1::CheckObjectiveResponse>(
      executor_, context, request, response,
      [this](
          const v1::CheckObjectiveRequest& request) -> absl::StatusOr<v1::CheckObjectiveResponse> {
        if (!request.has_policy()) return InvalidField("policy", "is required");
        TANDEM_ASSIGN_OR_RETURN(const PolicyObjective objective,
                                ResolveObjective(request.policy(), options_.support));
        v1::CheckObjectiveResponse out;
        *out.mutable_policy() = ToProto(objective);
        return out;
      });
}

}  // namespace tandem::trainer
