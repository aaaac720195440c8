#include "common/rpc/calls/stream_handlers.h"

#include <gmock/gmock.h>
#include <google/protobuf/unknown_field_set.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "common/base/errors/error.h"
#include "common/rpc/calls/broadcaster.h"
#include "common/rpc/message_size.h"
#include "common/rpc/testing/raw_call.h"
#include "common/rpc/testing/server.h"
#include "tandem/trainer/v1/trainer.grpc.pb.h"

namespace tandem::rpc {
namespace {

using testing::HasSubstr;
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
  explicit Counting(std::atomic<int>& ended) : ended_(ended) {}
  absl::Status OnMessage(const TrainStepRequest& message) override {
    if (message.message_case() == TrainStepRequest::MESSAGE_NOT_SET) {
      return InvalidField("message", "is required");
    }
    ++count_;
    return absl::OkStatus();
  }
  absl::StatusOr<TrainStepResponse> OnEnd(const CallScope&) override {
    ++ended_;
    TrainStepResponse response;
    response.mutable_report()->set_step(count_);
    return response;
  }

 private:
  std::atomic<int>& ended_;
  int64_t count_ = 0;
};

using StreamCallbacks = TrainerService::WithRawCallbackMethod_TrainStep<
    TrainerService::WithRawCallbackMethod_ComputeLogProbs<
        TrainerService::WithRawCallbackMethod_WatchSteps<TrainerService::Service>>>;

class StreamService final : public StreamCallbacks {
 public:
  explicit StreamService(CallExecutor& executor) : executor_(executor) {}

  grpc::ServerReadReactor<grpc::ByteBuffer>* TrainStep(grpc::CallbackServerContext* context,
                                                       grpc::ByteBuffer* response) override {
    return HandleClientStream<TrainStepRequest, TrainStepResponse>(
        executor_, context, response, std::make_unique<Counting>(ended_));
  }
  grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* ComputeLogProbs(
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
  grpc::ServerWriteReactor<grpc::ByteBuffer>* WatchSteps(grpc::CallbackServerContext* context,
                                                         const grpc::ByteBuffer* request) override {
    ++watches_;
    return readers_.Add(executor_, context, request);
  }

  CallExecutor& executor_;
  std::atomic<int> ended_ = 0;    // client streams that came to their end
  std::atomic<int> watches_ = 0;  // calls of WatchSteps that came
  std::atomic<int> handled_ = 0;
  std::atomic<bool> blocked_ = false;
  std::atomic<bool> released_ = false;
  size_t payload_bytes_ = 0;
  Broadcaster<WatchStepsRequest, WatchStepsResponse> readers_{/*capacity=*/4};
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

constexpr char kTrainStep[] = "/tandem.trainer.v1.TrainerService/TrainStep";
constexpr char kComputeLogProbs[] = "/tandem.trainer.v1.TrainerService/ComputeLogProbs";
const std::string kGarbage = "\xff\xff\xff\xff";

std::string Header() {
  TrainStepRequest message;
  message.mutable_header();
  return message.SerializeAsString();
}

class StreamHandlersTest : public testing::Test {
 protected:
  explicit StreamHandlersTest(const OpenStreamsOptions& streams = {.patience = absl::Seconds(60)})
      : server_([](ServerRuntime& runtime) { return std::make_unique<StreamApp>(runtime); },
                {.default_deadline = absl::Seconds(60), .streams = streams}) {}

  StreamService& service() { return static_cast<StreamApp&>(server_.app()).service_; }
  int64_t held_bytes() { return server_.executor().streams().held_bytes().used_bytes(); }

  TestServer server_;
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

// A message that cannot be read is no half-close: the messages before it must not take effect.
TEST_F(StreamHandlersTest, GarbageEndsAClientStreamWithAnError) {
  RawCall call(server_.channel(), kTrainStep);
  call.Write(Header());
  call.Write(kGarbage);
  const absl::Status status = call.Finish();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(FieldPath(status), "messages[1]");
  EXPECT_THAT(std::string(status.message()), HasSubstr("tandem.trainer.v1.TrainStepRequest"));
  EXPECT_EQ(service().ended_, 0);
}

TEST_F(StreamHandlersTest, AMessageAboveTheLimitEndsAClientStreamWithAnError) {
  for (int i = 0; i < 50; ++i) {  // the end of the call and that of the reading may cross
    RawCall call(server_.channel(), kTrainStep);
    call.Write(Header());
    call.Write(std::string(kMaxReceiveBytes + 1, 'x'));
    EXPECT_EQ(call.Finish().code(), absl::StatusCode::kResourceExhausted);
  }
  EXPECT_TRUE(Eventually([&] { return server_.server().live_calls() == 0; }));
  EXPECT_EQ(service().ended_, 0);
}

TEST_F(StreamHandlersTest, AClientThatGoesEndsAClientStreamWithAnError) {
  for (int i = 0; i < 50; ++i) {
    RawCall call(server_.channel(), kTrainStep);
    call.Write(Header());
  }
  EXPECT_TRUE(Eventually([&] { return server_.server().live_calls() == 0; }));
  EXPECT_EQ(service().ended_, 0);
}

TEST_F(StreamHandlersTest, GarbageEndsAMapStreamWithAnError) {
  RawCall call(server_.channel(), kComputeLogProbs);
  ComputeLogProbsRequest request;
  request.set_temperature(7);
  call.Write(request.SerializeAsString());
  EXPECT_TRUE(call.Read().has_value());
  call.Write(kGarbage);
  const absl::Status status = call.Finish();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(FieldPath(status), "messages[1]");
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
  EXPECT_LE(held_bytes(), 12 << 20) << "kMaxBufferedBytes, and what came on top of them";
  ComputeLogProbsResponse response;
  int read = 0;
  while (stream->Read(&response)) ++read;
  writer.join();
  EXPECT_EQ(read, 500);
  EXPECT_EQ(held_bytes(), 0);
  EXPECT_TRUE(stream->Finish().ok());
}

TEST_F(StreamHandlersTest, EveryReaderGetsWhatIsPublishedAndTheEnd) {
  grpc::ClientContext second, late;
  std::vector<std::unique_ptr<grpc::ClientReader<WatchStepsResponse>>> streams;
  for (auto* const context : {&context_, &second}) {
    streams.push_back(stub_->WatchSteps(context, {}));
  }
  ASSERT_TRUE(Eventually([&] { return service().readers_.num_readers() == 2; }));
  WatchStepsResponse response;
  for (int i = 0; i < 3; ++i) {
    response.mutable_report()->set_step(i);
    service().readers_.Publish(response);
  }
  service().readers_.Close(absl::UnavailableError("draining"));
  for (const auto& stream : streams) {
    for (int i = 0; i < 3; ++i) {
      ASSERT_TRUE(stream->Read(&response));
      EXPECT_EQ(response.report().step(), i);
    }
    EXPECT_FALSE(stream->Read(&response));
    EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::UNAVAILABLE);
  }
  EXPECT_EQ(stub_->WatchSteps(&late, {})->Finish().error_code(), grpc::StatusCode::UNAVAILABLE);
}

TEST_F(StreamHandlersTest, AReaderThatIsTooSlowIsEnded) {
  auto stream = stub_->WatchSteps(&context_, WatchStepsRequest());
  ASSERT_TRUE(Eventually([&] { return service().readers_.num_readers() == 1; }));
  WatchStepsResponse response;
  response.mutable_report()->set_run_id(std::string(1 << 20, 'x'));
  for (int i = 0; i < 100; ++i) service().readers_.Publish(response);
  int read = 0;
  while (stream->Read(&response)) ++read;
  EXPECT_LT(read, 100);
  EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
}

TEST_F(StreamHandlersTest, ARequestOfTooManyPartsOpensNoServerStream) {
  WatchStepsRequest request;
  for (int i = 0; i < 2'000'000; ++i) {
    request.GetReflection()->MutableUnknownFields(&request)->AddLengthDelimited(15, "");
  }
  context_.set_deadline(std::chrono::system_clock::now() + std::chrono::minutes(1));
  auto stream = stub_->WatchSteps(&context_, request);
  EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_EQ(service().readers_.num_readers(), 0);
  EXPECT_TRUE(Eventually([&] { return held_bytes() == 0; }));
}

TEST_F(StreamHandlersTest, AReaderThatGoesIsForgotten) {
  auto stream = stub_->WatchSteps(&context_, WatchStepsRequest());
  ASSERT_TRUE(Eventually([&] { return service().readers_.num_readers() == 1; }));
  context_.TryCancel();
  EXPECT_TRUE(Eventually([&] { return service().readers_.num_readers() == 0; }));
  service().readers_.Publish(WatchStepsResponse());
}

TEST_F(StreamHandlersTest, AConnectionHasABoundOfCalls) {
  std::vector<grpc::ClientContext> contexts(kMaxCallsPerConnection);
  std::vector<std::unique_ptr<grpc::ClientReader<WatchStepsResponse>>> watchers;
  for (auto& context : contexts) watchers.push_back(stub_->WatchSteps(&context, {}));
  ASSERT_TRUE(Eventually([&] { return service().watches_ == kMaxCallsPerConnection; }));
  grpc::ClientContext one_more;
  std::thread held_back([&] { stub_->WatchSteps(&one_more, {})->Finish(); });
  // Another connection is served meanwhile.
  auto other = TrainerService::NewStub(server_.channel())->WatchSteps(&context_, {});
  ASSERT_TRUE(Eventually([&] { return service().watches_ == kMaxCallsPerConnection + 1; }));
  contexts.front().TryCancel();
  EXPECT_TRUE(Eventually([&] { return service().watches_ == kMaxCallsPerConnection + 2; }));
  one_more.TryCancel();
  held_back.join();
  context_.TryCancel();
  for (auto& context : contexts) context.TryCancel();
}

class BoundedStreamsTest : public StreamHandlersTest {
 protected:
  BoundedStreamsTest()
      : StreamHandlersTest(
            {.max_streams = 2, .max_held_bytes = 1 << 20, .patience = absl::Milliseconds(200)}) {}
};

TEST_F(BoundedStreamsTest, OneStreamTooManyIsRefused) {
  grpc::ClientContext second, third, fourth;
  auto watch = stub_->WatchSteps(&context_, WatchStepsRequest());
  auto map = stub_->ComputeLogProbs(&second);
  ComputeLogProbsRequest request;
  ComputeLogProbsResponse response;
  ASSERT_TRUE(map->Write(request) && map->Read(&response));
  ASSERT_TRUE(Eventually([&] { return service().readers_.num_readers() == 1; }));
  auto refused = stub_->ComputeLogProbs(&third);
  const absl::Status status = FromGrpcStatus(refused->Finish());
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(RetryAfterMilliseconds(status).has_value());
  auto refused_watch = stub_->WatchSteps(&fourth, WatchStepsRequest());
  EXPECT_EQ(refused_watch->Finish().error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  map->WritesDone();
  EXPECT_TRUE(map->Finish().ok());
  EXPECT_TRUE(Eventually([&] {
    grpc::ClientContext again;
    auto retry = stub_->ComputeLogProbs(&again);
    retry->WritesDone();
    return retry->Finish().ok();
  }));
  context_.TryCancel();
}

TEST_F(BoundedStreamsTest, MoreBytesThanTheServerMayHoldEndTheStream) {
  auto stream = stub_->ComputeLogProbs(&context_);
  ComputeLogProbsRequest request;
  for (int i = 0; i < 2'000'000; ++i) request.add_prompt_token_ids(1);
  stream->Write(request);
  EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_TRUE(Eventually([&] { return held_bytes() == 0; }));
}

class ImpatientTest : public StreamHandlersTest {
 protected:
  ImpatientTest() : StreamHandlersTest({.patience = absl::Milliseconds(200)}) {}
};

// Its flow-control window is full, so that not even the end of the stream could be told.
TEST_F(ImpatientTest, AReaderThatNeverReadsIsGivenUp) {
  service().payload_bytes_ = 1 << 20;
  auto stream = stub_->ComputeLogProbs(&context_);
  ComputeLogProbsRequest request;
  request.set_temperature(1);
  while (stream->Write(request)) {
  }
  EXPECT_TRUE(Eventually([&] { return server_.server().live_calls() == 0; }));
  EXPECT_TRUE(Eventually([&] { return held_bytes() == 0; }));
  ComputeLogProbsResponse response;
  while (stream->Read(&response)) {
  }
  EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::CANCELLED);
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
