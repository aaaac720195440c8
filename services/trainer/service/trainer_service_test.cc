#include <gmock/gmock.h>

#include <thread>

#include "common/coauthoring/testing/authors.h"
#include "services/trainer/service/objective_convert.h"
#include "services/trainer/service/testing/fixture.h"

namespace tandem::trainer {
namespace {

using testing::HasSubstr;
using Stub = v1::TrainerService::Stub;

v1::TrainStepRequest SupervisedMessage() {
  v1::TrainStepRequest message;
  message.mutable_supervised_sample()->add_prompt_token_ids(1);
  message.mutable_supervised_sample()->add_response_token_ids(2);
  return message;
}

TEST_F(TrainerServerTest, AStepReachesTheEngineWhole) {
  const auto response = TrainStep({Message(PolicyHeader(2)), Message(Sample()), Message(Sample())});
  ASSERT_TRUE(response.ok()) << response.status();
  EXPECT_FALSE(response->replayed());
  EXPECT_EQ(response->report().run_id(), "run");
  EXPECT_EQ(response->report().step(), 1);
  EXPECT_EQ(response->report().weights().version(), 1);
  EXPECT_EQ(response->report().metrics().at("loss/total"), 0.5);
  ASSERT_EQ(engine_->steps().size(), 1u);
  const TrainStepRequest request = engine_->steps()[0];
  EXPECT_EQ(request.request_id, "r-1");
  const auto& batch = std::get<PolicyBatch>(request.batch);
  ASSERT_EQ(batch.samples.size(), 2u);
  EXPECT_EQ(batch.samples[1].trajectory.authorship_mask, Authors("SJ"));
}

TEST_F(TrainerServerTest, ASupervisedStepReachesTheEngine) {
  v1::TrainStepHeader header = PolicyHeader(1);
  header.mutable_supervised();
  ASSERT_TRUE(TrainStep({Message(header), SupervisedMessage()}).ok());
  const auto batch = std::get<SupervisedBatch>(engine_->steps().at(0).batch);
  EXPECT_EQ(batch.samples.at(0).response_token_ids, (std::vector<int32_t>{2}));
}

TEST_F(TrainerServerTest, ARepeatedRequestIsMarkedAsReplayed) {
  engine_->critic_seconds = 1.5;
  const auto first = TrainStep({Message(PolicyHeader(1)), Message(Sample())});
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_EQ(first->critic_seconds(), 1.5);
  const auto repeat = TrainStep({Message(PolicyHeader(1)), Message(Sample())});
  ASSERT_TRUE(repeat.ok()) << repeat.status();
  EXPECT_TRUE(repeat->replayed());
  EXPECT_EQ(repeat->critic_seconds(), 0);
  EXPECT_EQ(repeat->report().weights().version(), 1);
  EXPECT_EQ(engine_->steps().size(), 1u);
}

// Bad input gets a typed error with the field's path.
TEST_F(TrainerServerTest, EveryMalformedStepIsRefusedByNameAndTheServerServesOn) {
  v1::TrainStepHeader long_id = PolicyHeader(1);
  long_id.set_run_id(std::string(257, 'x'));
  v1::PolicySample no_mask = Sample();
  no_mask.mutable_trajectory()->clear_authorship_mask();
  v1::TrainStepHeader unknown_enum = PolicyHeader(1);
  unknown_enum.mutable_policy()->set_kl_estimator(v1::KlEstimator(77));
  v1::TrainStepHeader supervised = PolicyHeader(1);
  supervised.mutable_supervised();
  const struct {
    std::string path;
    std::vector<v1::TrainStepRequest> messages;
  } cases[] = {
      {"header", {}},
      {"header", {Message(Sample())}},
      {"header", {Message(PolicyHeader(1)), Message(PolicyHeader(1))}},
      {"header", {v1::TrainStepRequest()}},
      {"header.num_samples", {Message(PolicyHeader(2)), Message(Sample())}},
      {"header.num_samples", {Message(PolicyHeader(1)), Message(Sample()), Message(Sample())}},
      {"header.num_samples", {Message(PolicyHeader(0))}},
      {"header.run_id", {Message(long_id)}},
      {"header.policy.kl_estimator", {Message(unknown_enum)}},
      {"samples[0].policy_sample", {Message(PolicyHeader(1)), v1::TrainStepRequest()}},
      {"samples[1].trajectory.authorship_mask",
       {Message(PolicyHeader(2)), Message(Sample()), Message(no_mask)}},
      {"samples[0].policy_sample", {Message(PolicyHeader(1)), SupervisedMessage()}},
      {"samples[0].supervised_sample", {Message(supervised), Message(Sample())}},
  };
  for (const auto& bad : cases) {
    const absl::Status status = TrainStep(bad.messages).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << bad.path << ": " << status;
    EXPECT_EQ(FieldPath(status), bad.path) << status;
  }
  EXPECT_TRUE(engine_->steps().empty());
  EXPECT_TRUE(TrainStep({Message(PolicyHeader(1)), Message(Sample())}).ok());
  EXPECT_TRUE(rpc::Eventually([&] { return app().service().buffered_bytes() == 0; }));
}

TEST_F(TrainerServerTest, TheEnginesErrorsArriveWithPathAndReason) {
  engine_->FailNext(WithReason(
      FieldError(absl::StatusCode::kFailedPrecondition, "expected_version", "is 3, not 0"),
      reason::kStalePolicyVersion));
  const absl::Status status = TrainStep({Message(PolicyHeader(1)), Message(Sample())}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(FieldPath(status), "header.expected_version");
  EXPECT_EQ(Reason(status), "STALE_POLICY_VERSION");
  EXPECT_THAT(server_.metrics().Text(), HasSubstr("tandem_train_steps_total{result=\"failed\"} 1"));
}

// The memory of steps in progress is bounded.
TEST(TrainStepMemoryTest, SamplesBeyondTheBudgetAreRefused) {
  std::unique_ptr<FakeEngine> engine = std::make_unique<FakeEngine>();
  class App final : public rpc::ServerApp {
   public:
    App(rpc::ServerRuntime& runtime, Engine* engine)
        : service_(Options(), runtime), engine_(engine) {}
    static TrainerServiceOptions Options() {
      TrainerServiceOptions options;
      options.max_samples = 4000;
      options.max_buffered_bytes = 4096;
      return options;
    }
    std::vector<rpc::NamedService> services() override {
      return {{v1::TrainerService::service_full_name(), &service_}};
    }
    absl::Status Load() override {
      service_.SetEngine(engine_);
      return absl::OkStatus();
    }

   private:
    TrainerService service_;
    Engine* engine_;
  };
  rpc::TestServer server(
      [&](rpc::ServerRuntime& runtime) { return std::make_unique<App>(runtime, engine.get()); });
  const auto stub = v1::TrainerService::NewStub(server.channel());
  grpc::ClientContext context;
  v1::TrainStepResponse response;
  auto stream = stub->TrainStep(&context, &response);
  v1::TrainStepRequest message;
  *message.mutable_header() = PolicyHeader(4000);
  stream->Write(message);
  for (int i = 0; i < 4000; ++i) {
    *message.mutable_policy_sample() = Sample();
    if (!stream->Write(message)) break;
  }
  const absl::Status status = rpc::FromGrpcStatus(stream->Finish());
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  EXPECT_FALSE(RetryAfterMilliseconds(status).has_value());  // would never fit
  EXPECT_TRUE(engine->steps().empty());
}

TEST_F(TrainerServerTest, AStepWhoseClientLeavesBeforeItsTurnNeverBegins) {
  engine_->Hold();
  std::thread first([&] {
    EXPECT_TRUE(TrainStep({Message(PolicyHeader(1, "first")), Message(Sample())}).ok());
  });
  engine_->WaitForSteps(1);
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(200));
  const absl::Status status =
      TrainStep({Message(PolicyHeader(1, "second")), Message(Sample())}, &context).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
  // The server notices the end of the call a little later than the client.
  ASSERT_TRUE(rpc::Eventually([&] { return server_.server().live_calls() == 1; }));
  engine_->Release();
  first.join();
  // A later call follows the clean-up of the second call.
  ASSERT_TRUE(TrainStep({Message(PolicyHeader(1, "third")), Message(Sample())}).ok());
  ASSERT_EQ(engine_->steps().size(), 2u);
  EXPECT_EQ(engine_->steps()[1].request_id, "third");
}

TEST_F(TrainerServerTest, LogProbsComeInTheOrderOfTheRequests) {
  grpc::ClientContext context;
  auto stream = stub_->ComputeLogProbs(&context);
  constexpr int kRequests = 100;
  std::thread writer([&] {
    for (int i = 0; i < kRequests; ++i) {
      v1::ComputeLogProbsRequest request;
      request.add_prompt_token_ids(1);
      request.add_response_token_ids(i);
      request.set_temperature(0.5);
      stream->Write(request);
    }
    stream->WritesDone();
  });
  v1::ComputeLogProbsResponse response;
  int count = 0;
  while (stream->Read(&response)) {
    EXPECT_EQ(rpc::FloatsFromProto(response.logprobs())->at(0), static_cast<float>(-count));
    EXPECT_EQ(rpc::FloatsFromProto(response.entropies())->at(0), 0.5f);
    ++count;
  }
  writer.join();
  EXPECT_TRUE(stream->Finish().ok());
  EXPECT_EQ(count, kRequests);
}

TEST_F(TrainerServerTest, ABadLogProbsRequestIsNamedByItsIndex) {
  grpc::ClientContext context;
  auto stream = stub_->ComputeLogProbs(&context);
  v1::ComputeLogProbsRequest request;
  request.add_prompt_token_ids(1);
  request.add_response_token_ids(2);
  stream->Write(request);
  request.set_temperature(-1);
  stream->Write(request);
  v1::ComputeLogProbsResponse response;
  while (stream->Read(&response)) {
  }
  const absl::Status status = rpc::FromGrpcStatus(stream->Finish());
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(FieldPath(status), "requests[1].temperature");
}

TEST_F(TrainerServerTest, WatchersSeeEveryNewStepAndNoReplay) {
  grpc::ClientContext context;
  auto stream = stub_->WatchSteps(&context, {});
  ASSERT_TRUE(rpc::Eventually([&] { return app().service().num_watchers() == 1; }));
  ASSERT_TRUE(TrainStep({Message(PolicyHeader(1, "a")), Message(Sample())}).ok());
  ASSERT_TRUE(TrainStep({Message(PolicyHeader(1, "a")), Message(Sample())}).ok());
  ASSERT_TRUE(TrainStep({Message(PolicyHeader(1, "b")), Message(Sample())}).ok());
  v1::WatchStepsResponse event;
  ASSERT_TRUE(stream->Read(&event));
  EXPECT_EQ(event.report().weights().version(), 1);
  ASSERT_TRUE(stream->Read(&event));
  EXPECT_EQ(event.report().weights().version(), 2);
  EXPECT_EQ(event.report().metrics().at("loss/total"), 0.5);
  server_.Drain();
  EXPECT_FALSE(stream->Read(&event));
  EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::UNAVAILABLE);
}

TEST_F(TrainerServerTest, AWatcherThatLeavesIsForgotten) {
  grpc::ClientContext context;
  auto stream = stub_->WatchSteps(&context, {});
  ASSERT_TRUE(rpc::Eventually([&] { return app().service().num_watchers() == 1; }));
  context.TryCancel();
  stream->Finish();
  EXPECT_TRUE(rpc::Eventually([&] {
    static int step = 0;
    EXPECT_TRUE(
        TrainStep({Message(PolicyHeader(1, std::to_string(++step))), Message(Sample())}).ok());
    return app().service().num_watchers() == 0;
  }));
}

TEST_F(TrainerServerTest, ServerInfoSaysWhatIsHeldAfterEveryStep) {
  const auto info = [&] {
    return *Call<v1::GetServerInfoResponse>(&Stub::GetServerInfo, v1::GetServerInfoRequest());
  };
  EXPECT_EQ(info().server().role(), "trainer");
  EXPECT_EQ(info().server().advertised_address(), server_.address());
  EXPECT_EQ(info().server().weights().version(), 0);
  EXPECT_EQ(info().server().model().vocab_size(), 16);
  EXPECT_EQ(info().server().model().vocabulary_digest(), "vocabulary");
  EXPECT_EQ(info().micro_batch_tokens(), 2048);
  EXPECT_EQ(info().max_samples(), kMaxSamples);
  EXPECT_FALSE(info().unsaved());
  // The schedule can be compared with a run before its first step.
  EXPECT_EQ(info().optimizer().options().total_steps(), 4);
  EXPECT_EQ(info().optimizer().options().schedule(), config::v1::LEARNING_RATE_SCHEDULE_LINEAR);
  EXPECT_EQ(info().optimizer().updates(), 0);
  EXPECT_EQ(info().optimizer().next_learning_rate(), 1e-3);
  EXPECT_FALSE(info().has_speculator_optimizer());
  ASSERT_TRUE(TrainStep({Message(PolicyHeader(1)), Message(Sample())}).ok());
  EXPECT_EQ(info().server().weights().version(), 1);
  EXPECT_EQ(info().optimizer_steps(), 1);
  EXPECT_EQ(info().optimizer().updates(), 1);
  EXPECT_DOUBLE_EQ(info().optimizer().next_learning_rate(), 0.75e-3);
  EXPECT_TRUE(info().unsaved());
  EXPECT_EQ(info().server().weights().digest(), engine_->Info().weights.digest);
}

TEST_F(TrainerServerTest, ServerInfoDoesNotWaitForARunningStep) {
  engine_->Hold();
  std::thread step([&] {
    EXPECT_TRUE(TrainStep({Message(PolicyHeader(1)), Message(Sample())}).ok());
  });
  engine_->WaitForSteps(1);
  EXPECT_TRUE(
      Call<v1::GetServerInfoResponse>(&Stub::GetServerInfo, v1::GetServerInfoRequest()).ok());
  engine_->Release();
  step.join();
}

TEST_F(TrainerServerTest, CheckpointsAreCounted) {
  const auto text = [&] { return server_.metrics().Text(); };
  EXPECT_THAT(text(), HasSubstr("tandem_checkpoints_total{result=\"failed\"} 0"));
  training::CheckpointReport report = {.saved = absl::ResourceExhaustedError("the disk is full"),
                                       .held_seconds = 0.5};
  app().service().OnCheckpoint(report);
  EXPECT_THAT(text(), HasSubstr("tandem_checkpoints_total{result=\"failed\"} 1"));
  EXPECT_THAT(text(), HasSubstr("tandem_checkpoint_timestamp_seconds 0"));
  report.saved = checkpoint::Saved{.path = "/ckpt/step_000001", .bytes = 1234};
  report.written_seconds = 3;
  app().service().OnCheckpoint(report);
  EXPECT_THAT(text(), HasSubstr("tandem_checkpoints_total{result=\"ok\"} 1"));
  EXPECT_THAT(text(), HasSubstr("tandem_checkpoint_bytes 1234"));
  EXPECT_THAT(text(), HasSubstr("tandem_step_seconds_sum{phase=\"save\"} 1"));
  EXPECT_THAT(text(), HasSubstr("tandem_step_seconds_sum{phase=\"write\"} 3"));
}

TEST_F(TrainerServerTest, CheckpointsAreSavedAndLoaded) {
  v1::SaveCheckpointRequest save;
  save.set_directory("/ckpt");
  save.set_name("step_000001");
  save.set_expected_version(0);
  const auto saved = Call<v1::SaveCheckpointResponse>(&Stub::SaveCheckpoint, save);
  ASSERT_TRUE(saved.ok()) << saved.status();
  EXPECT_EQ(saved->path(), "/ckpt/step_000001");
  EXPECT_FALSE(saved->pending());
  EXPECT_EQ(saved->bytes(), 1234);
  save.set_in_background(true);
  EXPECT_TRUE(Call<v1::SaveCheckpointResponse>(&Stub::SaveCheckpoint, save)->pending());
  save.clear_expected_version();
  EXPECT_EQ(FieldPath(Call<v1::SaveCheckpointResponse>(&Stub::SaveCheckpoint, save).status()),
            "in_background");
  save.set_in_background(false);
  save.set_expected_version(1);
  EXPECT_EQ(FieldPath(Call<v1::SaveCheckpointResponse>(&Stub::SaveCheckpoint, save).status()),
            "expected_version");

  v1::LoadCheckpointRequest load;
  load.set_path("/ckpt/step_000041");
  const auto loaded = Call<v1::LoadCheckpointResponse>(&Stub::LoadCheckpoint, load);
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  EXPECT_EQ(loaded->weights().version(), 41);
  EXPECT_THAT(server_.metrics().Text(), HasSubstr("tandem_weights_version 41"));
  EXPECT_EQ(engine_->loaded().optimizer, training::OptimizerState::kKeep);
  load.set_optimizer(types::v1::OPTIMIZER_STATE_FRESH);
  ASSERT_TRUE(Call<v1::LoadCheckpointResponse>(&Stub::LoadCheckpoint, load).ok());
  EXPECT_EQ(engine_->loaded().optimizer, training::OptimizerState::kFresh);
  load.set_optimizer(static_cast<types::v1::OptimizerState>(7));
  EXPECT_EQ(FieldPath(Call<v1::LoadCheckpointResponse>(&Stub::LoadCheckpoint, load).status()),
            "optimizer");
  load.clear_optimizer();

  engine_->FailNext(absl::DataLossError("manifest.json: bad digest"));
  EXPECT_EQ(Call<v1::LoadCheckpointResponse>(&Stub::LoadCheckpoint, load).status().code(),
            absl::StatusCode::kDataLoss);
}

TEST_F(TrainerServerTest, TheBaseModelIsLoaded) {
  ASSERT_TRUE(TrainStep({Message(PolicyHeader(1)), Message(Sample())}).ok());
  v1::LoadCheckpointRequest load;
  load.set_base_model(true);
  const auto loaded = Call<v1::LoadCheckpointResponse>(&Stub::LoadCheckpoint, load);
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  EXPECT_EQ(loaded->weights().version(), 0);
  EXPECT_EQ(loaded->weights().digest(), FakeWeights(0).manifest().digest);
  EXPECT_FALSE(engine_->unsaved());
  EXPECT_THAT(server_.metrics().Text(), HasSubstr("tandem_weights_version 0"));
}

TEST_F(TrainerServerTest, BadCheckpointRequestsAreRefusedByName) {
  v1::SaveCheckpointRequest save;
  const auto path = [&] {
    return FieldPath(Call<v1::SaveCheckpointResponse>(&Stub::SaveCheckpoint, save).status());
  };
  EXPECT_EQ(path(), "directory");
  save.set_directory("~");
  save.set_name("step_1");
  EXPECT_EQ(path(), "directory");
  save.set_directory("/ckpt");
  save.clear_name();
  EXPECT_EQ(path(), "name");
  for (const char* bad : {"..", "a/b", "/etc", "."}) {
    save.set_name(bad);
    EXPECT_EQ(path(), "name") << bad;
  }
  save.set_name("ok");
  save.set_keep(-1);
  EXPECT_EQ(path(), "keep");
  v1::LoadCheckpointRequest load;
  const auto load_path = [&] {
    return FieldPath(Call<v1::LoadCheckpointResponse>(&Stub::LoadCheckpoint, load).status());
  };
  EXPECT_EQ(load_path(), "source");
  load.set_path("");
  EXPECT_EQ(load_path(), "path");
  load.set_path("~/ckpt");
  EXPECT_EQ(load_path(), "path");
  load.set_base_model(false);
  EXPECT_EQ(load_path(), "base_model");
  EXPECT_EQ(engine_->version(), 0);
}

TEST_F(TrainerServerTest, AnObjectiveIsCheckedAsAStepChecksIt) {
  v1::CheckObjectiveRequest request;
  const auto check = [&] {
    return Call<v1::CheckObjectiveResponse>(&Stub::CheckObjective, request);
  };
  EXPECT_EQ(FieldPath(check().status()), "policy");
  request.mutable_policy()->set_clip_ratio_low(0.125);
  const auto resolved = check();
  ASSERT_TRUE(resolved.ok()) << resolved.status();
  EXPECT_EQ(resolved->policy().clip_ratio_low(), 0.125);
  EXPECT_EQ(resolved->policy().clip_ratio_high(), 0.2);
  EXPECT_EQ(resolved->policy().loss_kind(), v1::POLICY_LOSS_KIND_PPO_CLIP);

  v1::PolicyObjective bad[4];
  bad[0].set_entropy_coefficient(1e308);
  bad[1].set_junior_kl_coefficient(0.1);
  bad[2].set_advantage_estimator(v1::ADVANTAGE_ESTIMATOR_GAE);  // no critic is configured
  bad[3].set_kl_coefficient(0.1);                               // no reference model either
  for (const v1::PolicyObjective& objective : bad) {
    *request.mutable_policy() = objective;
    const absl::Status checked = check().status();
    v1::TrainStepHeader header = PolicyHeader(1);
    *header.mutable_policy() = objective;
    const absl::Status trained = TrainStep({Message(header)}).status();
    EXPECT_FALSE(checked.ok());
    EXPECT_EQ(checked.code(), trained.code()) << checked << trained;
    EXPECT_EQ("header." + FieldPath(checked).value_or(""), FieldPath(trained)) << trained;
    EXPECT_EQ(Reason(checked), Reason(trained));
  }
  EXPECT_TRUE(engine_->steps().empty());
}

TEST_F(TrainerServerTest, ExportTakesFloatTypesOnly) {
  v1::ExportModelRequest request;
  const auto call = [&] { return Call<v1::ExportModelResponse>(&Stub::ExportModel, request); };
  EXPECT_EQ(FieldPath(call().status()), "path");
  request.set_path("/out");
  ASSERT_TRUE(call().ok());
  EXPECT_EQ(engine_->export_dtype(), DType::kFloat32);
  request.set_dtype(types::v1::DATA_TYPE_BFLOAT16);
  ASSERT_TRUE(call().ok());
  EXPECT_EQ(engine_->export_dtype(), DType::kBFloat16);
  request.set_dtype(types::v1::DATA_TYPE_INT64);
  EXPECT_EQ(FieldPath(call().status()), "dtype");
  request.set_dtype(types::v1::DataType(55));
  EXPECT_EQ(FieldPath(call().status()), "dtype");
}

TEST_F(TrainerServerTest, StepsAreCountedInTheMetrics) {
  ASSERT_TRUE(TrainStep({Message(PolicyHeader(1)), Message(Sample())}).ok());
  ASSERT_TRUE(TrainStep({Message(PolicyHeader(1)), Message(Sample())}).ok());
  const std::string text = server_.metrics().Text();
  EXPECT_THAT(text, HasSubstr("tandem_train_steps_total{result=\"applied\"} 1"));
  EXPECT_THAT(text, HasSubstr("tandem_train_steps_total{result=\"replayed\"} 1"));
  EXPECT_THAT(text, HasSubstr("tandem_trained_tokens_total 2"));
  EXPECT_THAT(text, HasSubstr("tandem_loss 0.5"));
  EXPECT_THAT(text, HasSubstr("tandem_weights_version 1"));
  EXPECT_THAT(text, HasSubstr("tandem_step_seconds_count{phase=\"train\"} 2"));
}

TEST_F(TrainerServerTest, TheAccuracyOfEveryHeadIsAGauge) {
  engine_->Report("speculator/loss", 7.5);
  engine_->Report("speculator/head_0_accuracy", 0.75);
  engine_->Report("speculator/head_1_accuracy", 0.25);
  ASSERT_TRUE(TrainStep({Message(PolicyHeader(1)), Message(Sample())}).ok());
  const std::string text = server_.metrics().Text();
  EXPECT_THAT(text, HasSubstr("tandem_speculator_loss 7.5"));
  EXPECT_THAT(text, HasSubstr("tandem_speculator_accuracy{head=\"0\"} 0.75"));
  EXPECT_THAT(text, HasSubstr("tandem_speculator_accuracy{head=\"1\"} 0.25"));
  EXPECT_THAT(text, testing::Not(HasSubstr("head=\"2\"")));
}

TEST_F(TrainerServerTest, DroppedSamplesAreCounted) {
  engine_->Report("policy/dropped_samples", 3);
  for (int i = 0; i < 2; ++i) {  // a repeat counts nothing
    ASSERT_TRUE(TrainStep({Message(PolicyHeader(1)), Message(Sample())}).ok());
  }
  EXPECT_THAT(server_.metrics().Text(), HasSubstr("tandem_dropped_samples_total 3"));
}

TEST_F(TrainerServerTest, AStepWhoseNumbersAreNotFiniteIsCountedApart) {
  engine_->SkipNext();
  ASSERT_TRUE(TrainStep({Message(PolicyHeader(1)), Message(Sample())}).ok());
  const std::string text = server_.metrics().Text();
  EXPECT_THAT(text, HasSubstr("tandem_train_steps_total{result=\"not_finite\"} 1"));
  EXPECT_THAT(text, HasSubstr("tandem_train_steps_total{result=\"skipped\"} 0"));
  EXPECT_THAT(text, HasSubstr("tandem_trained_tokens_total 0"));
}

TEST_F(TrainerServerTest, TheConfigurationBecomesTheEnginesOptions) {
  config::v1::TrainerServerConfig config;
  config.set_model("/models/senior");
  config.set_reference_model("/models/reference");
  config.mutable_optimizer()->set_learning_rate(3e-5);
  config.mutable_optimizer()->set_schedule(config::v1::LEARNING_RATE_SCHEDULE_COSINE);
  config.mutable_optimizer()->set_total_steps(50);
  config.mutable_batch()->set_micro_batch_tokens(77);
  config.mutable_compute()->set_num_threads(3);
  config.mutable_compute()->set_dtype("bfloat16");
  config.add_freeze("*norm.weight");
  config.mutable_speculator()->set_adapter("arctic_lstm");
  config.mutable_speculator()->set_method("sum_lstm");
  config.mutable_speculator()->set_n_predict(2);
  config.mutable_speculator()->set_tie_weights(true);
  config.mutable_speculator()->mutable_optimizer()->set_learning_rate(1e-3);
  ASSERT_TRUE(config::Resolve(&config).ok());
  const EngineOptions options = ToEngineOptions(config, {});
  EXPECT_EQ(options.model, "/models/senior");
  EXPECT_EQ(options.reference_model, "/models/reference");
  EXPECT_EQ(options.optimizer.learning_rate, 3e-5);
  EXPECT_EQ(options.optimizer.schedule, LearningRateSchedule::kCosine);
  EXPECT_EQ(options.optimizer.total_steps, 50);
  EXPECT_EQ(options.micro_batch_tokens, 77);
  EXPECT_EQ(options.compute.num_threads, 3);
  EXPECT_EQ(options.compute.dtype, "bfloat16");
  EXPECT_EQ(options.freeze, (std::vector<std::string>{"*norm.weight"}));
  EXPECT_EQ(options.speculator.adapter, "arctic_lstm");
  EXPECT_EQ(options.speculator.method, "sum_lstm");
  EXPECT_EQ(options.speculator.n_predict, 2);
  EXPECT_TRUE(options.speculator.tie_weights);
  EXPECT_EQ(options.speculator_optimizer.learning_rate, 1e-3);
  EXPECT_EQ(options.speculator_optimizer.beta2, 0.999);
  EXPECT_FALSE(options.freeze_base_model || SupportOf(config).frozen);
  config.mutable_speculator()->set_freeze_base_model(true);
  EXPECT_TRUE(ToEngineOptions(config, {}).freeze_base_model && SupportOf(config).frozen);
  // Without settings: the defaults of server_config.proto.
  EXPECT_EQ(options.optimizer.max_grad_norm, 1);
  EXPECT_EQ(options.max_model_len, 2048);
  EXPECT_EQ(options.max_samples, 4096);
  EXPECT_EQ(options.loss_impl, "auto");
  EXPECT_EQ(options.logits_chunk_bytes, 0);
}

TEST_F(TrainerServerTest, ADrainingServerRefusesNewSteps) {
  server_.Drain();
  EXPECT_EQ(TrainStep({Message(PolicyHeader(1)), Message(Sample())}).status().code(),
            absl::StatusCode::kUnavailable);
}

}  // namespace
}  // namespace tandem::trainer
