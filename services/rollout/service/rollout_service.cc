#include "services/rollout/service/rollout_service.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/base/errors/error.h"
#include "common/base/errors/status_macros.h"
#include "common/base/steady_time.h"
#include "common/rpc/calls/error_table.h"
#include "common/rpc/calls/reactor_call.h"
#include "common/rpc/calls/stream_message.h"
#include "common/rpc/calls/unary_handler.h"
#include "common/rpc/convert/proto_convert.h"
#include "common/rpc/grpc_time.h"
#include "common/rpc/server/server_info.h"
#include "services/rollout/service/convert.h"

namespace tandem::rollout {

// Moves messages between gRPC and a GenerateStream, with one read and one write in flight. While
// too many events wait for the client, nothing is read, and HTTP/2 flow control holds the client
// back.
class RolloutService::GenerateReactor final
    : public grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
 public:
  GenerateReactor(RolloutService* service, grpc::CallbackServerContext* context)
      : service_(service),
        outbox_([this](const v1::GenerateResponse* response) { Write(*response); },
                [this](grpc::Status status) { Finish(std::move(status)); },
                service->executor_.streams().held_bytes()),
        admitted_(Admit(context)),
        stream_(std::make_shared<GenerateStream>(
            service->engine_.load(),
            GenerateStreamOptions{.tandem = service->options_.tandem,
                                  .max_batch_samples = service->options_.max_batch_samples,
                                  .deadline = rpc::FromGrpcTime(context->raw_deadline()),
                                  .stream = ++service->last_stream_},
            &service->blobs_, &service->collected_bytes_, &outbox_)),
        request_id_(rpc::AssignRequestId(context)),
        traceparent_(rpc::TraceparentOf(*context)) {
    if (!admitted_.ok()) {
      outbox_.Finish(rpc::ToGrpcStatus(admitted_));
      return;
    }
    service_->Register(stream_);
    StartRead(&incoming_);
  }

  void OnReadDone(bool ok) override {
    received_ = true;
    const ScopedCallLog call_log(request_id_, traceparent_);
    if (!ok) {
      stream_->OnHalfClose();
      return;
    }
    const absl::Status status = rpc::UseMessage<v1::GenerateRequest>(
        num_messages_++, incoming_,
        [this](const v1::GenerateRequest& request) { return stream_->OnMessage(request); });
    if (!status.ok()) {
      outbox_.FinishNow(rpc::ToGrpcStatus(status));
      stream_->OnClientGone();
      return;
    }
    {
      std::lock_guard lock(mutex_);
      reading_ = false;
    }
    ReadOn();
  }
  void OnWriteDone(bool ok) override {
    outbox_.OnWriteDone(ok);
    if (!ok) {
      stream_->OnClientGone();
    } else {
      ReadOn();
    }
  }
  void OnCancel() override {
    const ScopedCallLog call_log(request_id_, traceparent_);
    stream_->OnClientGone();
  }
  void OnDone() override {
    place_.reset();
    stream_->Detach();
    service_->Unregister(stream_);
    delete this;
  }

 private:
  absl::Status Admit(grpc::CallbackServerContext* context) {
    TANDEM_RETURN_IF_ERROR(
        service_->executor_.Admit(*context, rpc::RoleFor<v1::GenerateRequest>()));
    TANDEM_ASSIGN_OR_RETURN(place_, service_->executor_.streams().Enter(
                                        {.waits_since = [this] { return outbox_.waits_since(); },
                                         .give_up = [context] { context->TryCancel(); },
                                         .unused = [this] { return !received_; },
                                         .admitted =
                                             [this, context] {
                                               return service_->executor_.StillAllows(
                                                   *context, rpc::RoleFor<v1::GenerateRequest>());
                                             }}));
    return absl::OkStatus();
  }

  void Write(const v1::GenerateResponse& response) {
    outgoing_ = rpc::SerializeMessage(response);
    StartWrite(&outgoing_);
  }

  // Called from reactions alone.
  void ReadOn() {
    if (outbox_.ended() || !stream_->WantsMore()) return;
    {
      std::lock_guard lock(mutex_);
      if (std::exchange(reading_, true)) return;
    }
    StartRead(&incoming_);
  }

  RolloutService* const service_;
  grpc::ByteBuffer incoming_;
  grpc::ByteBuffer outgoing_;
  GenerateStream::Outbox outbox_;
  std::atomic<bool> received_ = false;  // a message, or the half-close
  rpc::OpenStreams::Place place_;
  const absl::Status admitted_;  // before stream_: the engine exists once a call is admitted
  const std::shared_ptr<GenerateStream> stream_;
  const std::string request_id_;
  const std::string traceparent_;
  int64_t num_messages_ = 0;
  std::mutex mutex_;
  bool reading_ = true;  // stays true after the half-close
};

RolloutService::RolloutService(const rpc::ServerRuntime& runtime,
                               const RolloutServiceOptions& options)
    : runtime_(runtime),
      executor_(runtime.executor),
      options_(options),
      collected_bytes_(options.max_collected_bytes),
      heartbeat_([this] { Beat(); }) {}

RolloutService::~RolloutService() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  stop_changed_.notify_all();
  heartbeat_.join();
}

void RolloutService::SetEngine(Engine* engine) {
  engine_ = engine;
  if (engine->Info().senior.vision.has_value()) blobs_.SetCapacity(options_.blob_cache_bytes);
}

void RolloutService::Drain() {
  std::vector<std::shared_ptr<GenerateStream>> streams;
  {
    std::lock_guard lock(mutex_);
    draining_ = true;
    streams.assign(streams_.begin(), streams_.end());
  }
  for (const auto& stream : streams) stream->Drain();
}

int64_t RolloutService::open_streams() const {
  std::lock_guard lock(mutex_);
  return static_cast<int64_t>(streams_.size());
}

void RolloutService::Register(const std::shared_ptr<GenerateStream>& stream) {
  std::lock_guard lock(mutex_);
  streams_.insert(stream);
  if (draining_) stream->Drain();
}

void RolloutService::Unregister(const std::shared_ptr<GenerateStream>& stream) {
  std::lock_guard lock(mutex_);
  streams_.erase(stream);
}

void RolloutService::Beat() {
  const auto period =
      absl::ToChronoMilliseconds(std::min(options_.heartbeat_interval / 2, absl::Seconds(1)));
  std::unique_lock lock(mutex_);
  while (!stop_changed_.wait_for(lock, period, [this] { return stop_; })) {
    const std::vector<std::shared_ptr<GenerateStream>> streams(streams_.begin(), streams_.end());
    lock.unlock();
    for (const auto& stream : streams) stream->Tick(SteadyTime::Now(), options_.heartbeat_interval);
    lock.lock();
  }
}

grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* RolloutService::Generate(
    grpc::CallbackServerContext* context) {
  return new GenerateReactor(this, context);
}

grpc::ServerUnaryReactor* RolloutService::GetServerInfo(grpc::CallbackServerContext* context,
                                                        const grpc::ByteBuffer* request,
                                                        grpc::ByteBuffer* response) {
  return rpc::AnswerAtOnce<v1::GetServerInfoRequest, v1::GetServerInfoResponse>(
      executor_, context, request, response,
      [this](const v1::GetServerInfoRequest&) -> absl::StatusOr<v1::GetServerInfoResponse> {
        Engine& engine = *engine_.load();
        v1::GetServerInfoResponse response;
        *response.mutable_server() = rpc::DescribeServer(runtime_, "rollout");
        InfoToProto(engine.Info(), options_.tandem, engine.weights().Version(),
                    engine.Stats().paused, &response);
        if (const auto speculator = engine.weights().ComponentVersion(kSpeculatorComponent)) {
          rpc::WeightsVersionToProto(*speculator, response.mutable_speculator_weights());
        }
        response.set_max_queue(static_cast<int32_t>(options_.max_batch_samples));
        return response;
      });
}

grpc::ServerUnaryReactor* RolloutService::Score(grpc::CallbackServerContext* context,
                                                const grpc::ByteBuffer* request,
                                                grpc::ByteBuffer* response) {
  // Asynchronous: a score takes many steps of the engine, and no worker waits for it.
  return rpc::HandleUnaryAsync<v1::ScoreRequest, v1::ScoreResponse>(
      executor_, context, request, response,
      [this](const v1::ScoreRequest& proto, const CallScope& call,
             const auto& done) -> absl::Status {
        TANDEM_ASSIGN_OR_RETURN(ScoreRequest request, ScoreFromProto(proto));
        for (size_t i = 0; i < request.sequences.size(); ++i) {
          TANDEM_RETURN_IF_ERROR(
              PrependFieldPath(absl::StrCat("sequences[", i, "]"),
                               blobs_.Collect(request.sequences[i].vision_inputs, request.blobs)));
        }
        return engine_.load()->Score(std::move(request), call,
                                     [done](const absl::StatusOr<ScoreResult>& result) {
                                       if (result.ok()) {
                                         done(ScoreToProto(*result));
                                       } else {
                                         done(result.status());
                                       }
                                     });
      });
}

grpc::ServerUnaryReactor* RolloutService::Pause(grpc::CallbackServerContext* context,
                                                const grpc::ByteBuffer* request,
                                                grpc::ByteBuffer* response) {
  return rpc::HandleUnary<v1::PauseRequest, v1::PauseResponse>(
      executor_, context, request, response,
      [this](const v1::PauseRequest&, const CallScope& call) -> absl::StatusOr<v1::PauseResponse> {
        TANDEM_ASSIGN_OR_RETURN(const int64_t held, engine_.load()->Pause(call));
        v1::PauseResponse result;
        result.set_held_sequences(static_cast<int32_t>(held));
        return result;
      });
}

grpc::ServerUnaryReactor* RolloutService::Resume(grpc::CallbackServerContext* context,
                                                 const grpc::ByteBuffer* request,
                                                 grpc::ByteBuffer* response) {
  return rpc::HandleUnary<v1::ResumeRequest, v1::ResumeResponse>(
      executor_, context, request, response,
      [this](const v1::ResumeRequest&,
             const CallScope& call) -> absl::StatusOr<v1::ResumeResponse> {
        TANDEM_RETURN_IF_ERROR(engine_.load()->Resume(call));
        return v1::ResumeResponse();
      });
}

}  // namespace tandem::rollout
