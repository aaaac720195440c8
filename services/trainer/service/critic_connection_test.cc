#include "services/trainer/service/critic_connection.h"

#include <gtest/gtest.h>

#include <stop_token>
#include <thread>

#include "common/base/errors/error.h"
#include "common/base/errors/not_finite.h"
#include "common/base/steady_time.h"
#include "common/rpc/testing/server.h"
#include "services/critic/service/critic_app.h"
#include "services/critic/service/testing/fake_engine.h"

namespace tandem::trainer {
namespace {

class CriticConnectionTest : public testing::Test {
 protected:
  static CriticConnection::TrainRequest Request() {
    CriticConnection::TrainRequest request;
    request.step = {.run_id = "run", .step = 3, .request_id = "r-3/critic"};
    request.sequences = {{{1}, {5, 6}}, {{2}, {7}}};
    request.old_values = {{0.5f, 0.6f}, {0.7f}};
    request.returns = {{1, 2}, {3}};
    return request;
  }

  static rpc::RetryOptions Retry() {
    rpc::RetryOptions retry;
    retry.max_attempts = 3;
    retry.initial_backoff = absl::Milliseconds(10);
    return retry;
  }

  absl::StatusOr<CriticConnection::Values> ComputeValues(
      const std::vector<CriticConnection::Sequence>& sequences) {
    return critic_->ComputeValues(call_, Request().step, sequences);
  }

  CallScope scope_;
  Blobs blobs_;
  int progress_ = 0;
  const CriticConnection::Call call_{
      .scope = scope_, .progress = [this] { ++progress_; }, .blobs = blobs_};
  critic::FakeEngine* engine_ = nullptr;  // owned by the app
  rpc::TestServer server_{[this](rpc::ServerRuntime& runtime) {
    config::v1::CriticServerConfig config;
    config.set_model("/models/fake");
    EXPECT_TRUE(config::Resolve(&config).ok());
    return std::make_unique<critic::CriticApp>(
        config, runtime, [this](const critic::EngineOptions&) {
          auto engine = std::make_unique<critic::FakeEngine>();
          engine_ = engine.get();
          return engine;
        });
  }};
  std::shared_ptr<CriticConnection> critic_ = MakeCriticConnection(server_.channel(), Retry());
};

TEST_F(CriticConnectionTest, ValuesComeBackInOrder) {
  // Enough to fill any flow-control window if one side did not read while the other writes.
  std::vector<CriticConnection::Sequence> sequences(300);
  for (int i = 0; i < 300; ++i) sequences[i] = {{1}, std::vector<int32_t>(500, i)};
  const auto values = ComputeValues(sequences);
  ASSERT_TRUE(values.ok()) << values.status();
  ASSERT_EQ(values->values.size(), 300u);
  for (int i = 0; i < 300; ++i) {
    EXPECT_EQ(values->values[i], std::vector<float>(500, static_cast<float>(i)));
    EXPECT_EQ(values->final_values[i], 500);
  }
  EXPECT_EQ(values->weights.version, 0);
  EXPECT_EQ(progress_, 300);
  const critic::ValuesRequest asked = engine_->WaitForValuesRequest();
  EXPECT_EQ(asked.run_id, "run");
  EXPECT_EQ(asked.request_id, "r-3/critic");
}

TEST_F(CriticConnectionTest, ValuesOfTwoVersionsAreRefused) {
  engine_->Drift();
  EXPECT_EQ(ComputeValues({{{1}, {2}}, {{1}, {3}}}).status().code(), absl::StatusCode::kAborted);
}

TEST_F(CriticConnectionTest, ValuesAreAskedForAgainWhenTheCriticWasUnavailable) {
  engine_->FailNext(absl::UnavailableError("restarting"));
  EXPECT_TRUE(ComputeValues({{{1}, {2}}}).ok());
}

TEST_F(CriticConnectionTest, BadInputIsNotRetriedAndKeepsItsPath) {
  const absl::Status status = ComputeValues({{{1}, {2}}, {{1}, {}}}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(FieldPath(status), "requests[1].response_token_ids");
}

TEST_F(CriticConnectionTest, AStepReachesTheCriticWhole) {
  CriticConnection::TrainRequest request = Request();
  request.value_clip = 0.5;
  request.updates = {.num_mini_batches = 2, .num_epochs = 3};
  const auto metrics = critic_->TrainStep(call_, request);
  ASSERT_TRUE(metrics.ok()) << metrics.status();
  EXPECT_EQ(metrics->at("critic/loss"), 0.25);
  const critic::TrainStepRequest got = engine_->steps().at(0);
  EXPECT_EQ(got.value_clip, 0.5);
  EXPECT_EQ(got.updates, request.updates);
  EXPECT_EQ(got.run_id, "run");
  EXPECT_EQ(got.step, 3);
  EXPECT_EQ(got.request_id, "r-3/critic");
  ASSERT_EQ(got.samples.size(), 2u);
  EXPECT_EQ(got.samples[0].response_token_ids, (std::vector<int32_t>{5, 6}));
  EXPECT_EQ(got.samples[0].old_values, (std::vector<float>{0.5f, 0.6f}));
  EXPECT_EQ(got.samples[1].returns, (std::vector<float>{3}));
  EXPECT_TRUE(got.samples[0].loss_mask.empty());
}

TEST_F(CriticConnectionTest, LossMasksReachTheCritic) {
  CriticConnection::TrainRequest request = Request();
  request.loss_masks = {{1, 0}, {1}};
  ASSERT_TRUE(critic_->TrainStep(call_, request).ok());
  EXPECT_EQ(engine_->steps().at(0).samples[0].loss_mask, (std::vector<uint8_t>{1, 0}));
}

// A step is applied once, however often it is retried.
TEST_F(CriticConnectionTest, ALostAnswerIsRepeatedUnderTheSameRequestId) {
  engine_->FailNext(absl::UnavailableError("the connection broke after the step"));
  const auto metrics = critic_->TrainStep(call_, Request());
  ASSERT_TRUE(metrics.ok()) << metrics.status();
  EXPECT_EQ(engine_->calls(), 2);
  EXPECT_EQ(engine_->steps().size(), 1u);
}

TEST_F(CriticConnectionTest, AStepThatTheCriticSkippedIsTold) {
  engine_->SkipNext("the gradient norm is not finite");
  for (int i = 0; i < 2; ++i) {  // the second answer comes from the critic's table
    const absl::Status status = critic_->TrainStep(call_, Request()).status();
    EXPECT_TRUE(IsNotFinite(status));
    EXPECT_EQ(status.message(), "the critic skipped the step: the gradient norm is not finite");
  }
  EXPECT_EQ(engine_->steps().size(), 1u);
}

TEST_F(CriticConnectionTest, AStaleVersionIsNotRetried) {
  CriticConnection::TrainRequest request = Request();
  request.expected_version = 5;
  EXPECT_EQ(critic_->TrainStep(call_, request).status().code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(engine_->calls(), 1);
}

TEST_F(CriticConnectionTest, ACancelledCallDoesNotWaitForASilentCritic) {
  engine_->BeSilent();
  std::stop_source caller;
  scope_.cancellation = caller.get_token();
  std::thread canceller([&] {
    engine_->WaitForValuesRequest();
    caller.request_stop();
  });
  EXPECT_EQ(ComputeValues({{{1}, {2}}}).status().code(), absl::StatusCode::kCancelled);
  canceller.join();
}

TEST_F(CriticConnectionTest, TheCallersDeadlineHoldsForASilentCritic) {
  engine_->BeSilent();
  scope_.deadline = SteadyTime::Now() + absl::Milliseconds(100);
  EXPECT_EQ(ComputeValues({{{1}, {2}}}).status().code(), absl::StatusCode::kDeadlineExceeded);
}

TEST_F(CriticConnectionTest, ADeadCriticIsReportedAfterTheAttemptsAreUsedUp) {
  server_.Stop();
  EXPECT_EQ(ComputeValues({{{1}, {2}}}).status().code(), absl::StatusCode::kUnavailable);
}

}  // namespace
}  // namespace tandem::trainer
