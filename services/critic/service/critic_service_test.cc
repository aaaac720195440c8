#include <gmock/gmock.h>

#include <functional>
#include <limits>
#include <thread>

#include "common/base/errors/error.h"
#include "common/rpc/calls/error_table.h"
#include "common/rpc/convert/proto_convert.h"
#include "common/rpc/testing/server.h"
#include "services/critic/service/convert.h"
#include "services/critic/service/critic_app.h"
#include "services/critic/service/testing/fake_engine.h"

namespace tandem::critic {
namespace {

using testing::HasSubstr;

class CriticServerTest : public testing::Test {
 protected:
  static v1::TrainStepRequest Header(int num_samples) {
    v1::TrainStepRequest message;
    v1::TrainStepHeader& header = *message.mutable_header();
    header.set_run_id("run");
    header.set_step(1);
    header.set_request_id("r-1");
    header.set_num_samples(num_samples);
    return message;
  }
  static v1::ValueSample Sample() {
    v1::ValueSample sample;
    sample.add_prompt_token_ids(1);
    sample.add_response_token_ids(2);
    sample.add_response_token_ids(3);
    rpc::FloatsToProto(std::vector<float>{0.5f, 0.25f}, sample.mutable_old_values());
    rpc::FloatsToProto(std::vector<float>{1, 2}, sample.mutable_returns());
    return sample;
  }
  static v1::TrainStepRequest Message(const v1::ValueSample& sample) {
    v1::TrainStepRequest message;
    *message.mutable_sample() = sample;
    return message;
  }
  absl::StatusOr<v1::TrainStepResponse> TrainStep(
      const std::vector<v1::TrainStepRequest>& messages) {
    grpc::ClientContext context;
    v1::TrainStepResponse response;
    auto stream = stub_->TrainStep(&context, &response);
    for (const auto& message : messages) {
      if (!stream->Write(message)) break;
    }
    stream->WritesDone();
    absl::Status status = rpc::FromGrpcStatus(stream->Finish());
    if (!status.ok()) return status;
    return response;
  }
  template <typename Response, typename Request, typename Method>
  absl::StatusOr<Response> Call(Method method, const Request& request) {
    grpc::ClientContext context;
    Response response;
    absl::Status status = rpc::FromGrpcStatus((stub_.get()->*method)(&context, request, &response));
    if (!status.ok()) return status;
    return response;
  }

  FakeEngine* engine_ = nullptr;  // owned by the app
  rpc::TestServer server_{[this](rpc::ServerRuntime& runtime) {
    config::v1::CriticServerConfig config;
    config.set_model("/models/fake");
    config.set_max_samples(8);
    EXPECT_TRUE(config::Resolve(&config).ok());
    return std::make_unique<CriticApp>(config, runtime, [this](const EngineOptions&) {
      auto engine = std::make_unique<FakeEngine>();
      engine_ = engine.get();
      return engine;
    });
  }};
  std::unique_ptr<v1::CriticService::Stub> stub_ = v1::CriticService::NewStub(server_.channel());
};

using Stub = v1::CriticService::Stub;

TEST_F(CriticServerTest, AStepReachesTheEngineAndItsRepeatIsReplayed) {
  v1::ValueSample masked = Sample();
  masked.set_loss_mask(std::string("\1\0", 2));
  const std::vector<v1::TrainStepRequest> step = {Header(2), Message(Sample()), Message(masked)};
  const auto response = TrainStep(step);
  ASSERT_TRUE(response.ok()) << response.status();
  EXPECT_EQ(response->weights().version(), 1);
  EXPECT_EQ(response->metrics().at("critic/loss"), 0.25);
  EXPECT_FALSE(response->replayed());
  const TrainStepRequest got = engine_->steps().at(0);
  EXPECT_EQ(got.value_clip, 0.2);  // the default
  EXPECT_EQ(got.samples.at(0).returns, (std::vector<float>{1, 2}));
  EXPECT_TRUE(got.samples.at(0).loss_mask.empty());
  EXPECT_EQ(got.samples.at(1).loss_mask, (std::vector<uint8_t>{1, 0}));

  const auto repeat = TrainStep(step);
  ASSERT_TRUE(repeat.ok());
  EXPECT_TRUE(repeat->replayed());
  const std::string text = server_.metrics().Text();
  EXPECT_THAT(text, HasSubstr("tandem_train_steps_total{result=\"applied\"} 1"));
  EXPECT_THAT(text, HasSubstr("tandem_trained_tokens_total 4"));
  EXPECT_THAT(text, HasSubstr("tandem_critic_loss 0.25"));
}

TEST_F(CriticServerTest, EveryMalformedStepIsRefusedByNameAndTheServerServesOn) {
  const auto sample = [](const std::function<void(v1::ValueSample&)>& spoil) {
    v1::ValueSample out = Sample();
    spoil(out);
    return std::vector<v1::TrainStepRequest>{Header(1), Message(out)};
  };
  const auto header = [](const std::function<void(v1::TrainStepHeader&)>& spoil) {
    v1::TrainStepRequest out = Header(1);
    spoil(*out.mutable_header());
    return std::vector<v1::TrainStepRequest>{out};
  };
  using S = v1::ValueSample;
  using H = v1::TrainStepHeader;
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  const struct {
    std::string path;
    std::vector<v1::TrainStepRequest> messages;
  } cases[] = {
      {"header", {}},
      {"header", {Message(Sample())}},
      {"header", {Header(1), Header(1)}},
      {"header.num_samples", {Header(2), Message(Sample())}},
      {"header.num_samples", {Header(1), Message(Sample()), Message(Sample())}},
      {"header.num_samples", header([](H& h) { h.set_num_samples(0); })},
      {"header.run_id", header([](H& h) { h.clear_run_id(); })},
      {"header.request_id", header([](H& h) { h.clear_request_id(); })},
      {"header.step", header([](H& h) { h.set_step(-1); })},
      {"header.value_clip", header([](H& h) { h.set_value_clip(-1); })},
      {"header.num_mini_batches", header([](H& h) { h.set_num_mini_batches(0); })},
      {"header.num_epochs", header([](H& h) { h.set_num_epochs(-1); })},
      {"samples[0].sample", {Header(1), v1::TrainStepRequest()}},
      {"samples[0].prompt_token_ids", sample([](S& s) { s.clear_prompt_token_ids(); })},
      {"samples[0].response_token_ids", sample([](S& s) { s.clear_response_token_ids(); })},
      {"samples[0].old_values", sample([](S& s) { s.clear_old_values(); })},
      {"samples[0].old_values", sample([](S& s) { s.add_response_token_ids(4); })},
      {"samples[0].returns", sample([](S& s) { s.clear_returns(); })},
      {"samples[0].returns[1]", sample([&](S& s) {
         rpc::FloatsToProto(std::vector<float>{1, kNan}, s.mutable_returns());
       })},
      {"samples[0].loss_mask", sample([](S& s) { s.set_loss_mask("\1"); })},
      {"samples[0].old_values", sample([](S& s) {
         rpc::FloatsToProto(std::vector<float>{0, 0, 1}, s.mutable_weights());
       })},
      {"samples[0].weights", sample([](S& s) {
         s.clear_old_values();
         s.clear_returns();
         rpc::FloatsToProto(std::vector<float>{0, 1}, s.mutable_weights());
       })},
      {"samples[0].loss_mask[1]", sample([](S& s) { s.set_loss_mask("\1\2"); })},
  };
  for (const auto& bad : cases) {
    const absl::Status status = TrainStep(bad.messages).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << bad.path << ": " << status;
    EXPECT_EQ(FieldPath(status), bad.path) << status;
  }
  EXPECT_EQ(TrainStep({Header(9)}).status().code(), absl::StatusCode::kOutOfRange);
  EXPECT_TRUE(engine_->steps().empty());
  EXPECT_TRUE(TrainStep({Header(1), Message(Sample())}).ok());
}

TEST_F(CriticServerTest, ValuesComeInTheOrderOfTheRequests) {
  grpc::ClientContext context;
  auto stream = stub_->ComputeValues(&context);
  std::thread writer([&] {
    for (int i = 0; i < 50; ++i) {
      v1::ComputeValuesRequest request;
      request.add_prompt_token_ids(1);
      request.add_response_token_ids(i);
      stream->Write(request);
    }
    stream->WritesDone();
  });
  v1::ComputeValuesResponse response;
  int count = 0;
  while (stream->Read(&response)) {
    EXPECT_EQ(rpc::FloatsFromProto(response.values())->at(0), static_cast<float>(count));
    EXPECT_EQ(rpc::FloatsFromProto(response.final_value())->at(0), 1.0f);
    ++count;
  }
  writer.join();
  EXPECT_TRUE(stream->Finish().ok());
  EXPECT_EQ(count, 50);
}

TEST_F(CriticServerTest, LongIdsAreRefusedByName) {
  v1::TrainStepRequest header = Header(1);
  header.mutable_header()->set_request_id(std::string(257, 'x'));
  EXPECT_EQ(FieldPath(TrainStep({header}).status()), "header.request_id");
  grpc::ClientContext context;
  auto stream = stub_->ComputeValues(&context);
  v1::ComputeValuesRequest request;
  request.add_prompt_token_ids(1);
  request.add_response_token_ids(2);
  request.mutable_step()->set_run_id(std::string(257, 'x'));
  request.mutable_step()->set_request_id("r-1");
  stream->Write(request);
  v1::ComputeValuesResponse response;
  EXPECT_FALSE(stream->Read(&response));
  EXPECT_EQ(FieldPath(rpc::FromGrpcStatus(stream->Finish())), "requests[0].step.run_id");
}

TEST_F(CriticServerTest, WhatNoCheckpointHoldsIsReported) {
  const auto unsaved = [&] {
    return Call<v1::GetServerInfoResponse>(&Stub::GetServerInfo, v1::GetServerInfoRequest())
        ->unsaved();
  };
  EXPECT_FALSE(unsaved());
  ASSERT_TRUE(TrainStep({Header(1), Message(Sample())}).ok());
  EXPECT_TRUE(unsaved());
}

TEST_F(CriticServerTest, InfoAndCheckpoints) {
  const auto info =
      Call<v1::GetServerInfoResponse>(&Stub::GetServerInfo, v1::GetServerInfoRequest());
  ASSERT_TRUE(info.ok()) << info.status();
  EXPECT_EQ(info->server().role(), "critic");
  EXPECT_EQ(info->value_head_initialized_from(), v1::VALUE_HEAD_SOURCE_RANDOM);
  EXPECT_FALSE(info->unsaved());
  EXPECT_EQ(info->optimizer().updates(), 0);
  EXPECT_EQ(info->optimizer().next_learning_rate(), info->optimizer().options().learning_rate());
  EXPECT_GT(info->optimizer().next_learning_rate(), 0);

  v1::SaveCheckpointRequest save;
  save.set_directory("/ckpt");
  save.set_name("a/b");
  EXPECT_EQ(FieldPath(Call<v1::SaveCheckpointResponse>(&Stub::SaveCheckpoint, save).status()),
            "name");
  save.set_name("step_1");
  EXPECT_EQ(Call<v1::SaveCheckpointResponse>(&Stub::SaveCheckpoint, save)->path(), "/ckpt/step_1");

  v1::LoadCheckpointRequest load;
  EXPECT_EQ(FieldPath(Call<v1::LoadCheckpointResponse>(&Stub::LoadCheckpoint, load).status()),
            "source");
  load.set_path("/ckpt/step_7");
  EXPECT_EQ(Call<v1::LoadCheckpointResponse>(&Stub::LoadCheckpoint, load)->weights().version(), 7);
  load.set_optimizer(types::v1::OPTIMIZER_STATE_FRESH);
  ASSERT_TRUE(Call<v1::LoadCheckpointResponse>(&Stub::LoadCheckpoint, load).ok());
  EXPECT_EQ(engine_->loaded().optimizer, training::OptimizerState::kFresh);
  load.set_base_model(true);
  EXPECT_EQ(Call<v1::LoadCheckpointResponse>(&Stub::LoadCheckpoint, load)->weights().version(), 0);

  v1::ExportModelRequest request;
  request.set_path("/out");
  request.set_dtype(types::v1::DATA_TYPE_INT32);
  EXPECT_EQ(FieldPath(Call<v1::ExportModelResponse>(&Stub::ExportModel, request).status()),
            "dtype");
  request.set_dtype(types::v1::DATA_TYPE_BFLOAT16);
  EXPECT_EQ(Call<v1::ExportModelResponse>(&Stub::ExportModel, request)->path(), "/out");
}

}  // namespace
}  // namespace tandem::critic
