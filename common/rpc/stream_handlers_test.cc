#include "common/rpc/stream_handlers.h"

#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/synchronization/notification.h"
#include "common/base/error.h"
#include "common/rpc/testing/server.h"
#include "tandem/trainer/v1/trainer.grpc.pb.h"

namespace tandem::rpc {
namespace {

using trainer::v1::ComputeLogProbsRequest;
using trainer::v1::ComputeLogProbsResponse;
using trainer::v1::TrainerService;
using trainer::v1::TrainStepRequest;
using trainer::v1::TrainStepResponse;
using trainer::v1::WatchStepsRequest;
using trainer::v1::WatchStepsResponse;

// Counts the messages of a stream; an empty one is refused.
class Counting final : public ClientStreamHandler<TrainStepRequest, TrainStepResponse> {
 public:
  absl::Status OnMessage(TrainStepRequest&& message) override {
    if (message.message_case() == TrainStepRequest::MESSAGE_NOT_SET) {
      return InvalidField("message", "required");
    }
    ++count_;
    return absl::OkStatus();
  }
  absl::StatusOr<TrainStepResponse> OnEnd(const CallScope&) override {
    TrainStepResponse response;
    response.mutable_report()->set_step(count_);
    return response;
  }

 private:
  int64_t count_ = 0;
};

class StreamService final : public TrainerService::CallbackService {
 public:
  explicit StreamService(CallExecutor& executor) : executor_(executor) {}

  grpc::ServerReadReactor<TrainStepRequest>* TrainStep(grpc::CallbackServerContext* context,
                                                       TrainStepResponse* response) override {
    return HandleClientStream<TrainStepRequest, TrainStepResponse>(executor_, context, response,
                                                                   std::make_unique<Counting>());
  }
  grpc::ServerBidiReactor<ComputeLogProbsRequest, ComputeLogProbsResponse>* ComputeLogProbs(
      grpc::CallbackServerContext* context) override {
    return HandleMapStream<ComputeLogProbsRequest, ComputeLogProbsResponse>(
        executor_, context,
        [this](const ComputeLogProbsRequest& request,
               const CallScope& context) -> absl::StatusOr<ComputeLogProbsResponse> {
          ++handled_;
          if (request.temperature() == 66) {
            blocked_ = true;
            EXPECT_TRUE(Eventually([&] { return context.cancelled(); }));
            released_ = true;
          }
          if (request.temperature() == 99) return InvalidField("temperature", "refused");
          ComputeLogProbsResponse response;
          response.mutable_weights()->set_version(static_cast<int64_t>(request.temperature()));
          response.mutable_logprobs()->set_data(std::string(payload_bytes_, 'x'));
          return response;
        });
  }
  grpc::ServerWriteReactor<WatchStepsResponse>* WatchSteps(grpc::CallbackServerContext* context,
                                                           const WatchStepsRequest*) override {
    return HandleServerStream<WatchStepsResponse>(
        executor_, context, 4,
        [this](std::shared_ptr<StreamWriter<WatchStepsResponse>> writer) { writer_ = writer; });
  }

  CallExecutor& executor_;
  std::atomic<int> handled_ = 0;
  std::atomic<bool> blocked_ = false;
  std::atomic<bool> released_ = false;
  size_t payload_bytes_ = 0;
  std::shared_ptr<StreamWriter<WatchStepsResponse>> writer_;
};

class StreamApp final : public ServerApp {
 public:
  explicit StreamApp(ServerRuntime& runtime) : service_(runtime.executor) {}
  std::vector<NamedService> services() override {
    return {{TrainerService::service_full_name(), &service_}};
  }
  absl::Status Load() override { return absl::OkStatus(); }
  StreamService service_;
};

class StreamHandlersTest : public testing::Test {
 protected:
  StreamService& service() { return static_cast<StreamApp&>(server_.app()).service_; }
  TestServer server_{[](ServerRuntime& runtime) { return std::make_unique<StreamApp>(runtime); }};
  std::unique_ptr<TrainerService::Stub> stub_ = TrainerService::NewStub(server_.channel());
  grpc::ClientContext context_;
};

TEST_F(StreamHandlersTest, AClientStreamIsAnsweredAtItsEnd) {
  TrainStepResponse response;
  auto stream = stub_->TrainStep(&context_, &response);
  TrainStepRequest message;
  message.mutable_header();
  for (int i = 0; i < 100; ++i) ASSERT_TRUE(stream->Write(message));
  stream->WritesDone();
  EXPECT_TRUE(stream->Finish().ok());
  EXPECT_EQ(response.report().step(), 100);
}

TEST_F(StreamHandlersTest, ABadMessageEndsAClientStreamAtOnce) {
  TrainStepResponse response;
  auto stream = stub_->TrainStep(&context_, &response);
  stream->Write(TrainStepRequest());
  const absl::Status status = FromGrpcStatus(stream->Finish());  // no half-close
  EXPECT_EQ(FieldPath(status), "message");
}

TEST_F(StreamHandlersTest, AMapStreamAnswersInOrder) {
  auto stream = stub_->ComputeLogProbs(&context_);
  std::thread writer([&] {
    ComputeLogProbsRequest request;
    for (int i = 0; i < 200; ++i) {
      request.set_temperature(1000 + i);
      EXPECT_TRUE(stream->Write(request));
    }
    stream->WritesDone();
  });
  ComputeLogProbsResponse response;
  int next = 0;
  while (stream->Read(&response)) EXPECT_EQ(response.weights().version(), 1000 + next++);
  writer.join();
  EXPECT_EQ(next, 200);
  EXPECT_TRUE(stream->Finish().ok());
}

TEST_F(StreamHandlersTest, AMapStreamAnswersOneByOneWithoutHalfClose) {
  auto stream = stub_->ComputeLogProbs(&context_);
  ComputeLogProbsRequest request;
  ComputeLogProbsResponse response;
  for (int i = 1; i < 20; ++i) {
    request.set_temperature(i);
    ASSERT_TRUE(stream->Write(request));
    ASSERT_TRUE(stream->Read(&response));
    EXPECT_EQ(response.weights().version(), i);
  }
  stream->WritesDone();
  EXPECT_FALSE(stream->Read(&response));
  EXPECT_TRUE(stream->Finish().ok());
}

TEST_F(StreamHandlersTest, AnErrorEndsAMapStream) {
  auto stream = stub_->ComputeLogProbs(&context_);
  ComputeLogProbsRequest request;
  request.set_temperature(99);
  ASSERT_TRUE(stream->Write(request));
  ComputeLogProbsResponse response;
  EXPECT_FALSE(stream->Read(&response));
  EXPECT_EQ(FieldPath(FromGrpcStatus(stream->Finish())), "temperature");
}

TEST_F(StreamHandlersTest, ACancelledMapStreamFreesItsWorker) {
  auto stream = stub_->ComputeLogProbs(&context_);
  ComputeLogProbsRequest request;
  request.set_temperature(66);
  ASSERT_TRUE(stream->Write(request));
  ASSERT_TRUE(Eventually([&] { return service().blocked_.load(); }));
  context_.TryCancel();
  EXPECT_FALSE(stream->Finish().ok());
  EXPECT_TRUE(Eventually([&] { return service().released_.load(); }));
  EXPECT_TRUE(Eventually([&] { return server_.server().live_calls() == 0; }));
}

TEST_F(StreamHandlersTest, AReaderThatStallsHoldsTheWorkBack) {
  service().payload_bytes_ = 1 << 20;
  auto stream = stub_->ComputeLogProbs(&context_);
  ComputeLogProbsRequest request;
  request.set_temperature(1);
  std::atomic<int> written = 0;
  std::thread writer([&] {
    for (int i = 0; i < 500 && stream->Write(request); ++i) ++written;
    stream->WritesDone();
  });
  // Until nothing moves any more.
  int last = -1;
  while (last != service().handled_.load()) {
    last = service().handled_.load();
    absl::SleepFor(absl::Milliseconds(300));
  }
  EXPECT_LT(last, 60) << "of 500: the rest waits in the client";
  ComputeLogProbsResponse response;
  int read = 0;
  while (stream->Read(&response)) ++read;
  writer.join();
  EXPECT_EQ(read, 500);
  EXPECT_TRUE(stream->Finish().ok());
}

TEST_F(StreamHandlersTest, AServerStreamCarriesWhatIsPushedAndCloses) {
  auto stream = stub_->WatchSteps(&context_, WatchStepsRequest());
  ASSERT_TRUE(Eventually([&] { return service().writer_ != nullptr; }));
  WatchStepsResponse response;
  for (int i = 0; i < 3; ++i) {
    response.mutable_report()->set_step(i);
    ASSERT_TRUE(service().writer_->Push(response));
  }
  for (int i = 0; i < 3; ++i) {
    ASSERT_TRUE(stream->Read(&response));
    EXPECT_EQ(response.report().step(), i);
  }
  service().writer_->Close(absl::UnavailableError("draining"));
  EXPECT_FALSE(stream->Read(&response));
  EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_FALSE(service().writer_->Push(response));
}

TEST_F(StreamHandlersTest, AWriterLearnsThatItsReaderIsGone) {
  auto stream = stub_->WatchSteps(&context_, WatchStepsRequest());
  ASSERT_TRUE(Eventually([&] { return service().writer_ != nullptr; }));
  context_.TryCancel();
  EXPECT_TRUE(Eventually([&] { return service().writer_->closed(); }));
  EXPECT_FALSE(service().writer_->Push(WatchStepsResponse()));
}

TEST_F(StreamHandlersTest, StreamsAreRefusedBehindTheGate) {
  server_.executor().SetGate(CallExecutor::Gate::kDraining);
  auto map = stub_->ComputeLogProbs(&context_);
  EXPECT_EQ(Reason(FromGrpcStatus(map->Finish())), "DRAINING");
  grpc::ClientContext second;
  auto watch = stub_->WatchSteps(&second, WatchStepsRequest());
  EXPECT_EQ(Reason(FromGrpcStatus(watch->Finish())), "DRAINING");
}

}  // namespace
}  // namespace tandem::rpc
