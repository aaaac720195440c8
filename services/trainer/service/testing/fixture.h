// For tests: the trainer server with a fake engine, over real gRPC.
#ifndef TANDEM_SERVICES_TRAINER_SERVICE_TESTING_FIXTURE_H_
#define TANDEM_SERVICES_TRAINER_SERVICE_TESTING_FIXTURE_H_

#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "common/base/errors/error.h"
#include "common/rpc/calls/error_table.h"
#include "common/rpc/testing/server.h"
#include "services/trainer/service/testing/fake_engine.h"
#include "services/trainer/service/testing/messages.h"
#include "services/trainer/service/trainer_app.h"

namespace tandem::trainer {

class TrainerServerTest : public testing::Test {
 protected:
  static constexpr int kMaxSamples = 8;

  static config::v1::TrainerServerConfig Config() {
    config::v1::TrainerServerConfig config;
    config.set_model("/models/fake");
    config.set_max_samples(kMaxSamples);
    config.mutable_optimizer()->set_learning_rate(1e-3);
    config.mutable_optimizer()->set_schedule(config::v1::LEARNING_RATE_SCHEDULE_LINEAR);
    config.mutable_optimizer()->set_total_steps(4);
    EXPECT_TRUE(config::Resolve(&config).ok());
    return config;
  }

  static v1::TrainStepRequest Message(const v1::TrainStepHeader& header) {
    v1::TrainStepRequest message;
    *message.mutable_header() = header;
    return message;
  }
  static v1::TrainStepRequest Message(const v1::PolicySample& sample) {
    v1::TrainStepRequest message;
    *message.mutable_policy_sample() = sample;
    return message;
  }

  // Sends the messages as one train step.
  absl::StatusOr<v1::TrainStepResponse> TrainStep(const std::vector<v1::TrainStepRequest>& messages,
                                                  grpc::ClientContext* context = nullptr) {
    grpc::ClientContext own_context;
    if (context == nullptr) context = &own_context;
    v1::TrainStepResponse response;
    auto stream = stub_->TrainStep(context, &response);
    for (const auto& message : messages) {
      if (!stream->Write(message)) break;
    }
    stream->WritesDone();
    absl::Status status = rpc::FromGrpcStatus(stream->Finish());
    if (!status.ok()) return status;
    return response;
  }

  // Returns the response of a unary call.
  template <typename Response, typename Request, typename Method>
  absl::StatusOr<Response> Call(Method method, const Request& request) {
    grpc::ClientContext context;
    Response response;
    absl::Status status = rpc::FromGrpcStatus((stub_.get()->*method)(&context, request, &response));
    if (!status.ok()) return status;
    return response;
  }

  TrainerApp& app() { return static_cast<TrainerApp&>(server_.app()); }

  FakeEngine* engine_ = nullptr;  // owned by the app
  rpc::TestServer server_{[this](rpc::ServerRuntime& runtime) {
    return std::make_unique<TrainerApp>(
        Config(), runtime, [this](const EngineOptions&, std::shared_ptr<CriticConnection>) {
          auto engine = std::make_unique<FakeEngine>();
          engine_ = engine.get();
          return engine;
        });
  }};
  std::unique_ptr<v1::TrainerService::Stub> stub_ = v1::TrainerService::NewStub(server_.channel());
};

}  // namespace tandem::trainer

#endif  // TANDEM_SERVICES_TRAINER_SERVICE_TESTING_FIXTURE_H_
