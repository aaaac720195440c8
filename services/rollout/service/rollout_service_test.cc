// The rollout service over a real connection, with a fake engine.
#include "services/rollout/service/rollout_service.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <map>
#include <memory>
#include <set>
#include <string>

#include "common/base/errors/error.h"
#include "common/base/steady_time.h"
#include "common/config/server_config.h"
#include "common/rpc/calls/error_table.h"
#include "common/rpc/convert/proto_convert.h"
#include "common/rpc/testing/raw_call.h"
#include "common/rpc/testing/server.h"
#include "services/rollout/service/rollout_app.h"
#include "services/rollout/service/testing/fake_engine.h"
#include "tandem/weights/v1/weights.grpc.pb.h"

namespace tandem::rollout {
namespace {

using rpc::Eventually;
using rpc::FromGrpcStatus;
using rpc::FromRpcStatus;
using testing::HasSubstr;

config::v1::RolloutServerConfig Config() {
  config::v1::RolloutServerConfig config;
  config.mutable_senior()->set_model("s");
  config.mutable_junior()->set_model("j");
  config.mutable_tandem()->set_prob_senior(0.25);
  EXPECT_TRUE(config::Resolve(&config).ok());
  return config;
}

v1::GenerateRequest Submit(const std::vector<std::string>& ids, int max_tokens, int samples = 1,
                           bool stream_tokens = false) {
  v1::GenerateRequest request;
  for (const std::string& id : ids) {
    v1::Prompt* prompt = request.mutable_submit()->add_prompts();
    prompt->set_request_id(id);
    prompt->add_prompt_token_ids(11);
    prompt->mutable_sampling()->set_max_tokens(max_tokens);
    prompt->set_num_samples(samples);
    prompt->set_stream_tokens(stream_tokens);
    prompt->set_seed(9);
  }
  return request;
}

class RolloutServiceTest : public testing::Test {
 protected:
  // Whether nothing of a stream is left.
  bool Idle() {
    return engine_->Stats().sequences_running == 0 && server_.server().live_calls() == 0;
  }

  FakeEngine* engine_ = nullptr;  // owned by the app
  rpc::TestServer server_{[this](rpc::ServerRuntime& runtime) {
    return std::make_unique<RolloutApp>(Config(), runtime, [this](const EngineOptions&) {
      auto engine = std::make_unique<FakeEngine>();
      engine_ = engine.get();
      return engine;
    });
  }};
  std::unique_ptr<v1::RolloutService::Stub> stub_ = v1::RolloutService::NewStub(server_.channel());
  grpc::ClientContext context_;
};

TEST_F(RolloutServiceTest, EverySampleComesBackAndTheStreamEnds) {
  auto stream = stub_->Generate(&context_);
  ASSERT_TRUE(stream->Write(Submit({"a", "b"}, 5, 3)));
  stream->WritesDone();
  std::set<std::pair<std::string, uint64_t>> seen;
  v1::GenerateResponse event;
  while (stream->Read(&event)) {
    if (event.has_heartbeat()) continue;
    ASSERT_TRUE(event.has_finished()) << event.DebugString();
    EXPECT_EQ(event.finished().draft_tokens(), 4);
    EXPECT_EQ(event.finished().accepted_draft_tokens(), 3);
    EXPECT_EQ(event.finished().trajectory().accepted_draft_mask(), (std::string{1, 1, 0, 1, 0}));
    const auto trajectory = rpc::TrajectoryFromProto(event.finished().trajectory());
    ASSERT_TRUE(trajectory.ok()) << trajectory.status();
    EXPECT_EQ(trajectory->response_token_ids.size(), 5u);
    EXPECT_EQ(trajectory->seed, 9u);
    EXPECT_EQ(trajectory->tandem.prob_senior, 0.25) << "the server's default";
    seen.insert({event.finished().request_id(), trajectory->sample_index});
  }
  EXPECT_TRUE(stream->Finish().ok());
  EXPECT_EQ(seen.size(), 6u);
  EXPECT_EQ(engine_->submissions, 1) << "one message is one admission";
}

TEST_F(RolloutServiceTest, EveryCallIsAStreamOfItsOwn) {
  std::set<uint64_t> streams;
  for (int call = 0; call < 3; ++call) {
    grpc::ClientContext context;
    auto stream = stub_->Generate(&context);
    v1::GenerateResponse event;
    for (const std::string id : {"a", "b"}) {
      ASSERT_TRUE(stream->Write(Submit({id}, 1)));
      ASSERT_TRUE(stream->Read(&event));
      streams.insert(engine_->last_stream);
    }
    stream->WritesDone();
    EXPECT_TRUE(stream->Finish().ok());
  }
  EXPECT_EQ(streams.size(), 3u) << "prompts of a call have one stream";
}

TEST_F(RolloutServiceTest, StreamedTokensAreCompleteAndInOrder) {
  auto stream = stub_->Generate(&context_);
  ASSERT_TRUE(stream->Write(Submit({"a"}, 50, 2, true)));
  stream->WritesDone();
  std::map<uint64_t, std::vector<int32_t>> tokens;
  std::map<uint64_t, std::string> masks;
  int finished = 0;
  v1::GenerateResponse event;
  while (stream->Read(&event)) {
    if (event.has_tokens()) {
      auto& list = tokens[event.tokens().sample_index()];
      EXPECT_EQ(event.tokens().offset(), static_cast<int>(list.size()));
      list.insert(list.end(), event.tokens().token_ids().begin(), event.tokens().token_ids().end());
      masks[event.tokens().sample_index()] += event.tokens().authorship_mask();
    } else if (event.has_finished()) {
      ++finished;
      const auto& trajectory = event.finished().trajectory();
      const auto& list = tokens[trajectory.sample_index()];
      EXPECT_EQ(std::vector<int32_t>(trajectory.response_token_ids().begin(),
                                     trajectory.response_token_ids().end()),
                list);
      EXPECT_EQ(trajectory.authorship_mask(), masks[trajectory.sample_index()]);
    }
  }
  EXPECT_EQ(finished, 2);
  EXPECT_TRUE(stream->Finish().ok());
}

TEST_F(RolloutServiceTest, ABadPromptFailsAloneWithItsFieldPath) {
  v1::GenerateRequest request = Submit({"good", "bad", "good", ""}, 3);
  request.mutable_submit()->mutable_prompts(1)->set_prompt_token_ids(0, -4);
  auto stream = stub_->Generate(&context_);
  ASSERT_TRUE(stream->Write(request));
  stream->WritesDone();
  int finished = 0;
  std::map<std::string, absl::Status> failed;
  v1::GenerateResponse event;
  while (stream->Read(&event)) {
    if (event.has_finished()) ++finished;
    if (event.has_failed()) {
      failed[event.failed().request_id()] = FromRpcStatus(event.failed().status());
    }
  }
  EXPECT_TRUE(stream->Finish().ok());
  EXPECT_EQ(finished, 1);
  EXPECT_EQ(FieldPath(failed["bad"]), "prompt_token_ids[0]");
  EXPECT_EQ(failed["good"].code(), absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(FieldPath(failed["good"]), "request_id");
  EXPECT_EQ(FieldPath(failed[""]), "request_id");
}

TEST_F(RolloutServiceTest, AFullQueueFailsThePromptWithARetryHint) {
  engine_->max_prompts = 1;
  auto stream = stub_->Generate(&context_);
  ASSERT_TRUE(stream->Write(Submit({"a", "b"}, 3)));
  v1::GenerateResponse event;
  for (int i = 0; i < 2; ++i) {
    ASSERT_TRUE(stream->Read(&event));
    const absl::Status status = FromRpcStatus(event.failed().status());
    EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
    EXPECT_EQ(RetryAfterMilliseconds(status), 100);
  }
  ASSERT_TRUE(stream->Write(Submit({"a"}, 3)));  // the id is free again
  stream->WritesDone();
  ASSERT_TRUE(stream->Read(&event));
  EXPECT_TRUE(event.has_finished());
  EXPECT_FALSE(stream->Read(&event));
  EXPECT_TRUE(stream->Finish().ok());
}

TEST_F(RolloutServiceTest, CancelPromptsFreesThemAndTheStreamGoesOn) {
  engine_->paused = true;
  auto stream = stub_->Generate(&context_);
  ASSERT_TRUE(stream->Write(Submit({"a", "b"}, 3)));
  v1::GenerateRequest cancel;
  cancel.mutable_cancel()->add_request_ids("a");
  cancel.mutable_cancel()->add_request_ids("unknown");
  ASSERT_TRUE(stream->Write(cancel));
  stream->WritesDone();
  v1::GenerateResponse event;
  ASSERT_TRUE(stream->Read(&event));
  EXPECT_EQ(event.failed().request_id(), "a");
  EXPECT_EQ(event.failed().status().code(), static_cast<int>(absl::StatusCode::kCancelled));
  engine_->Go();
  ASSERT_TRUE(stream->Read(&event));
  EXPECT_EQ(event.finished().request_id(), "b");
  EXPECT_FALSE(stream->Read(&event));
  EXPECT_TRUE(stream->Finish().ok());
}

TEST_F(RolloutServiceTest, ACancelledCallFreesItsSequences) {
  auto stream = stub_->Generate(&context_);
  ASSERT_TRUE(stream->Write(Submit({"a", "b"}, 1 << 30, 4)));
  ASSERT_TRUE(Eventually([&] { return engine_->Stats().sequences_running == 8; }));
  context_.TryCancel();
  EXPECT_TRUE(Eventually([&] { return Idle(); }));
}

TEST_F(RolloutServiceTest, TheClientsDeadlineFreesItsSequences) {
  context_.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(300));
  auto stream = stub_->Generate(&context_);
  ASSERT_TRUE(stream->Write(Submit({"a"}, 1 << 30)));
  v1::GenerateResponse event;
  while (stream->Read(&event)) {
  }
  EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
  EXPECT_TRUE(Eventually([&] { return Idle(); }));
}

TEST_F(RolloutServiceTest, AClientThatDropsItsConnectionFreesItsSequences) {
  {
    // A channel of its own: when the last reference goes, so does the connection.
    auto channel = server_.channel();
    auto stub = v1::RolloutService::NewStub(channel);
    grpc::ClientContext context;
    auto stream = stub->Generate(&context);
    ASSERT_TRUE(stream->Write(Submit({"a"}, 1 << 30)));
    ASSERT_TRUE(Eventually([&] { return engine_->Stats().sequences_running == 1; }));
  }
  EXPECT_TRUE(Eventually([&] { return Idle(); }));
}

TEST_F(RolloutServiceTest, AnActionThatIsMissingEndsTheStream) {
  auto stream = stub_->Generate(&context_);
  ASSERT_TRUE(stream->Write(Submit({"a"}, 1 << 30)));
  ASSERT_TRUE(stream->Write(v1::GenerateRequest()));
  v1::GenerateResponse event;
  while (stream->Read(&event)) {
  }
  EXPECT_EQ(FieldPath(FromGrpcStatus(stream->Finish())), "action");
  EXPECT_TRUE(Eventually([&] { return Idle(); }));
}

// Not a half-close: what the client meant to send is not known.
TEST_F(RolloutServiceTest, GarbageEndsTheStreamAndFreesItsSequences) {
  rpc::RawCall call(server_.channel(), "/tandem.rollout.v1.RolloutService/Generate");
  call.Write(Submit({"a"}, 1 << 30).SerializeAsString());
  ASSERT_TRUE(Eventually([&] { return engine_->Stats().sequences_running == 1; }));
  call.Write("\xff\xff\xff\xff");
  const absl::Status status = call.Finish();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(FieldPath(status), "messages[1]");
  EXPECT_TRUE(Eventually([&] { return Idle(); }));
}

TEST_F(RolloutServiceTest, MillionsOfEmptyPromptsAreOneError) {
  rpc::RawCall call(server_.channel(), "/tandem.rollout.v1.RolloutService/Generate");
  // GenerateRequest{1: SubmitPrompts{1: Prompt{}, …}}: two bytes per prompt.
  std::string prompts;
  for (int i = 0; i < 2'000'000; ++i) prompts += std::string("\x0a\x00", 2);
  std::string length;
  for (size_t rest = prompts.size(); rest > 0; rest >>= 7) {
    length += static_cast<char>((rest & 0x7f) | (rest > 0x7f ? 0x80 : 0));
  }
  call.Write("\x0a" + length + prompts);
  while (const std::optional<std::string> message = call.Read()) {
    v1::GenerateResponse event;
    ASSERT_TRUE(event.ParseFromString(*message));
    // Reading so many may take a busy machine longer than heartbeat_interval.
    EXPECT_TRUE(event.has_heartbeat()) << "an event per prompt: " << event.ShortDebugString();
  }
  const absl::Status status = call.Finish();
  // Refused before it is parsed: the message would take more memory than one may.
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(FieldPath(status), "messages[0]");
}

TEST_F(RolloutServiceTest, DrainRefusesNewPromptsAndFinishesOldOnes) {
  engine_->paused = true;
  auto stream = stub_->Generate(&context_);
  ASSERT_TRUE(stream->Write(Submit({"old"}, 3)));
  ASSERT_TRUE(Eventually([&] { return engine_->Stats().sequences_running == 1; }));
  server_.Drain();
  ASSERT_TRUE(stream->Write(Submit({"new"}, 3)));
  v1::GenerateResponse event;
  ASSERT_TRUE(stream->Read(&event));
  EXPECT_EQ(event.failed().request_id(), "new");
  EXPECT_EQ(Reason(FromRpcStatus(event.failed().status())), "DRAINING");
  engine_->Go();
  ASSERT_TRUE(stream->Read(&event));
  EXPECT_EQ(event.finished().request_id(), "old");
  EXPECT_FALSE(stream->Read(&event));
  EXPECT_EQ(Reason(FromGrpcStatus(stream->Finish())), "DRAINING");
}

TEST_F(RolloutServiceTest, DrainEndsIdleStreams) {
  auto stream = stub_->Generate(&context_);
  ASSERT_TRUE(stream->Write(Submit({"a"}, 1)));
  v1::GenerateResponse event;
  ASSERT_TRUE(stream->Read(&event));
  server_.Drain();
  EXPECT_FALSE(stream->Read(&event));
  EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::UNAVAILABLE);
}

TEST_F(RolloutServiceTest, ScoreReturnsWhatWasAsked) {
  v1::ScoreRequest request;
  request.set_junior(true);
  request.set_temperature(2);
  auto* sequence = request.add_sequences();
  for (int id : {1, 2, 3, 4}) sequence->add_token_ids(id);
  sequence->set_first_scored_token(2);
  v1::ScoreResponse response;
  ASSERT_TRUE(stub_->Score(&context_, request, &response).ok());
  EXPECT_EQ(response.weights().version(), 5);
  ASSERT_EQ(response.sequences_size(), 1);
  EXPECT_FALSE(response.sequences(0).has_senior_logprobs());
  EXPECT_EQ(*rpc::FloatsFromProto(response.sequences(0).junior_logprobs()),
            std::vector<float>({-2, -2}));
}

TEST_F(RolloutServiceTest, ScoresHoldNoWorker) {
  engine_->paused = true;
  v1::ScoreRequest request;
  request.set_senior(true);
  auto* sequence = request.add_sequences();
  for (int id : {1, 2, 3, 4}) sequence->add_token_ids(id);
  sequence->set_first_scored_token(2);
  constexpr int kScores = 20;  // more than there are workers
  std::vector<grpc::ClientContext> contexts(kScores);
  std::vector<v1::ScoreResponse> responses(kScores);
  std::atomic<int> answered = 0;
  for (int i = 0; i < kScores; ++i) {
    stub_->async()->Score(&contexts[i], &request, &responses[i], [&](const grpc::Status& status) {
      EXPECT_TRUE(status.ok()) << status.error_message();
      ++answered;
    });
  }
  ASSERT_TRUE(Eventually([&] { return engine_->scores_waiting() == kScores; }));
  v1::PauseResponse paused;
  EXPECT_TRUE(stub_->Pause(&context_, v1::PauseRequest(), &paused).ok());
  const auto weights = weights::v1::WeightService::NewStub(server_.channel());
  grpc::ClientContext commit_context;
  weights::v1::CommitUpdateRequest commit;
  commit.set_update_id("u");
  weights::v1::CommitUpdateResponse committed;
  EXPECT_TRUE(weights->CommitUpdate(&commit_context, commit, &committed).ok());
  EXPECT_EQ(answered, 0);
  engine_->Go();
  EXPECT_TRUE(Eventually([&] { return answered == kScores; }));
}

TEST_F(RolloutServiceTest, PauseAndResume) {
  v1::PauseResponse paused;
  ASSERT_TRUE(stub_->Pause(&context_, v1::PauseRequest(), &paused).ok());
  EXPECT_EQ(paused.held_sequences(), 0);
  v1::GetServerInfoResponse info;
  grpc::ClientContext second, third;
  ASSERT_TRUE(stub_->GetServerInfo(&second, v1::GetServerInfoRequest(), &info).ok());
  EXPECT_TRUE(info.paused());
  v1::ResumeResponse resumed;
  ASSERT_TRUE(stub_->Resume(&third, v1::ResumeRequest(), &resumed).ok());
  EXPECT_FALSE(engine_->paused);
}

TEST_F(RolloutServiceTest, ServerInfoSaysWhatItHolds) {
  v1::GetServerInfoResponse info;
  ASSERT_TRUE(stub_->GetServerInfo(&context_, v1::GetServerInfoRequest(), &info).ok());
  EXPECT_EQ(info.server().role(), "rollout");
  EXPECT_EQ(info.server().advertised_address(), server_.address());
  EXPECT_EQ(info.server().weights().version(), 5);
  EXPECT_EQ(info.server().weights().digest(), "weights-digest");
  EXPECT_EQ(info.server().model().vocab_size(), FakeEngine::kVocabulary);
  EXPECT_GE(info.server().uptime_seconds(), 0);
  EXPECT_EQ(info.junior_version(), "junior-digest");
  EXPECT_EQ(info.tandem().prob_senior(), 0.25);
  EXPECT_TRUE(info.tandem().enabled());
  EXPECT_EQ(info.word_boundary_token_ids_size(), 2);
  EXPECT_EQ(info.max_queue(), 4096);
}

TEST_F(RolloutServiceTest, MetricsFollowTheEngine) {
  auto stream = stub_->Generate(&context_);
  ASSERT_TRUE(stream->Write(Submit({"a"}, 5)));
  stream->WritesDone();
  v1::GenerateResponse event;
  while (stream->Read(&event)) {
  }
  ASSERT_TRUE(stream->Finish().ok());
  server_.app().UpdateMetrics();
  const std::string text = server_.metrics().Text();
  EXPECT_THAT(text, HasSubstr("tandem_generated_tokens_total{author=\"senior\"} 3"));
  EXPECT_THAT(text, HasSubstr("tandem_generated_tokens_total{author=\"junior\"} 2"));
  EXPECT_THAT(text, HasSubstr("tandem_sequences_running 0"));
  EXPECT_THAT(text, HasSubstr("tandem_weights_version 5"));
  EXPECT_THAT(text, HasSubstr("tandem_queue_capacity 4096"));
}

// Below: the stream's logic without a connection.

class GenerateStreamTest : public testing::Test {
 protected:
  // Returns the messages that have been written, in order.
  std::vector<v1::GenerateResponse> Written() {
    std::vector<v1::GenerateResponse> events;
    while (in_flight_ != nullptr) {
      events.push_back(*in_flight_);
      in_flight_ = nullptr;
      outbox_.OnWriteDone(true);
    }
    return events;
  }
  // The codes of the prompts that failed, by request_id.
  std::map<std::string, absl::StatusCode> Failures() {
    std::map<std::string, absl::StatusCode> codes;
    for (const v1::GenerateResponse& event : Written()) {
      if (event.has_failed()) {
        codes[event.failed().request_id()] = FromRpcStatus(event.failed().status()).code();
      }
    }
    return codes;
  }
  static GenerateStreamOptions StreamOptions() { return {.tandem = {}, .max_batch_samples = 500}; }
  static v1::GenerateRequest MoreFollow(v1::GenerateRequest request) {
    request.mutable_submit()->set_more_follow(true);
    return request;
  }

  FakeEngine engine_;
  rpc::BlobStore blobs_;
  rpc::ByteBudget budget_{1 << 20};
  rpc::ByteBudget event_bytes_{1 << 20};
  const v1::GenerateResponse* in_flight_ = nullptr;
  std::optional<grpc::Status> finished_;
  GenerateStream::Outbox outbox_{
      [this](const v1::GenerateResponse* response) { in_flight_ = response; },
      [this](grpc::Status status) { finished_ = status; }, event_bytes_};
  std::shared_ptr<GenerateStream> stream_ =
      std::make_shared<GenerateStream>(&engine_, StreamOptions(), &blobs_, &budget_, &outbox_);
};

TEST_F(GenerateStreamTest, ASlowReaderFindsMergedTokensAndBoundedMemory) {
  // Nobody reads: the first event stays in flight, all later ones of a sample merge.
  ASSERT_TRUE(stream_->OnMessage(Submit({"a", "b"}, 5000, 2, true)).ok());
  ASSERT_TRUE(Eventually([&] { return engine_.Stats().sequences_running == 0; }));
  ASSERT_TRUE(Eventually([&] { return stream_->unfinished_sequences() == 0; }));
  // One in flight; per sample at most one merged event and the trajectory.
  EXPECT_LE(outbox_.size(), 1u + 2u * 4u);
}

TEST_F(GenerateStreamTest, AFullOutboxStopsReading) {
  EXPECT_TRUE(stream_->WantsMore());
  std::vector<std::string> ids;
  for (int i = 0; i < 400; ++i) ids.push_back("p" + std::to_string(i));
  ASSERT_TRUE(stream_->OnMessage(Submit(ids, 1)).ok());
  ASSERT_TRUE(Eventually([&] { return stream_->unfinished_sequences() == 0; }));
  EXPECT_FALSE(stream_->WantsMore());
  Written();
  EXPECT_TRUE(stream_->WantsMore());
}

TEST_F(GenerateStreamTest, MessagesOfOneBatchAreAdmittedTogether) {
  ASSERT_TRUE(stream_->OnMessage(MoreFollow(Submit({"a", "b"}, 3))).ok());
  ASSERT_TRUE(stream_->OnMessage(MoreFollow(Submit({"c"}, 3, 2))).ok());
  EXPECT_EQ(engine_.submissions, 0);
  EXPECT_EQ(stream_->unfinished_sequences(), 4);
  ASSERT_TRUE(stream_->OnMessage(Submit({"d"}, 3)).ok());
  EXPECT_EQ(engine_.submissions, 1);
  ASSERT_TRUE(Eventually([&] { return stream_->unfinished_sequences() == 0; }));
  ASSERT_TRUE(stream_->OnMessage(Submit({"e"}, 3)).ok());
  EXPECT_EQ(engine_.submissions, 2) << "the next batch";
  EXPECT_EQ(budget_.used_bytes(), 0);
}

TEST_F(GenerateStreamTest, ABatchOfTooManySamplesIsRefusedAsAWhole) {
  ASSERT_TRUE(stream_->OnMessage(MoreFollow(Submit({"a"}, 3, 400))).ok());
  ASSERT_TRUE(stream_->OnMessage(MoreFollow(Submit({"b"}, 3, 101))).ok());
  ASSERT_TRUE(stream_->OnMessage(Submit({"c"}, 3)).ok());
  EXPECT_EQ(engine_.submissions, 0);
  constexpr auto kFull = absl::StatusCode::kResourceExhausted;
  EXPECT_THAT(Failures(), testing::ElementsAre(testing::Pair("a", kFull), testing::Pair("b", kFull),
                                               testing::Pair("c", kFull)));
  ASSERT_TRUE(stream_->OnMessage(Submit({"a"}, 3)).ok());
  EXPECT_EQ(engine_.submissions, 1) << "the stream goes on";
}

// Refused prompts count, too: a refusal of each would be held for the reader.
TEST_F(GenerateStreamTest, ABatchOfTooManyPromptsEndsTheStream) {
  v1::GenerateRequest empty;
  for (int i = 0; i < 300; ++i) empty.mutable_submit()->add_prompts();
  ASSERT_TRUE(stream_->OnMessage(MoreFollow(empty)).ok());
  EXPECT_EQ(outbox_.size(), 300u);
  const absl::Status status = stream_->OnMessage(empty);
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(FieldPath(status), "submit.prompts");
  EXPECT_EQ(outbox_.size(), 300u);
}

TEST_F(GenerateStreamTest, AnIdThatIsTooLongComesBackCut) {
  ASSERT_TRUE(stream_->OnMessage(Submit({std::string(1 << 20, 'x')}, 3)).ok());
  const std::vector<v1::GenerateResponse> events = Written();
  ASSERT_EQ(events.size(), 1u);
  EXPECT_EQ(events[0].failed().request_id(), std::string(256, 'x'));
  EXPECT_EQ(FieldPath(FromRpcStatus(events[0].failed().status())), "request_id");
}

TEST_F(GenerateStreamTest, AReaderThatLeavesTooMuchLosesItsSequences) {
  engine_.paused = true;
  v1::GenerateRequest request = Submit({"a"}, 1);
  for (int i = 0; i < 2000; ++i)
    request.mutable_submit()->mutable_prompts(0)->add_prompt_token_ids(1);
  request.mutable_submit()->mutable_prompts(0)->set_num_samples(400);  // 400 x 8 kB
  ASSERT_TRUE(stream_->OnMessage(request).ok());
  ASSERT_TRUE(stream_->OnMessage(Submit({"b"}, 1 << 30)).ok());
  engine_.Go();
  ASSERT_TRUE(Eventually([&] { return outbox_.ended(); }));
  EXPECT_LT(event_bytes_.used_bytes(), 100'000) << "what waited is given back";
  stream_->Tick(SteadyTime::Now(), absl::Seconds(5));
  EXPECT_TRUE(Eventually([&] { return engine_.Stats().sequences_running == 0; }));
  Written();
  ASSERT_TRUE(finished_.has_value());
  EXPECT_EQ(finished_->error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
}

TEST_F(GenerateStreamTest, ABatchOfTooManyBytesIsRefusedAsAWhole) {
  v1::GenerateRequest large = MoreFollow(Submit({"a"}, 3));
  for (int i = 0; i < 600'000; ++i)
    large.mutable_submit()->mutable_prompts(0)->add_prompt_token_ids(7);
  ASSERT_TRUE(stream_->OnMessage(large).ok());
  large.mutable_submit()->mutable_prompts(0)->set_request_id("b");
  ASSERT_TRUE(stream_->OnMessage(large).ok());
  ASSERT_TRUE(stream_->OnMessage(Submit({"c"}, 3)).ok());
  EXPECT_EQ(engine_.submissions, 0);
  EXPECT_EQ(Failures().size(), 3u);
  EXPECT_EQ(budget_.used_bytes(), 0);
}

TEST_F(GenerateStreamTest, AHalfClosedBatchIsRefusedAndTheStreamEnds) {
  ASSERT_TRUE(stream_->OnMessage(MoreFollow(Submit({"a"}, 3))).ok());
  stream_->OnHalfClose();
  EXPECT_THAT(Failures(),
              testing::ElementsAre(testing::Pair("a", absl::StatusCode::kInvalidArgument)));
  ASSERT_TRUE(finished_.has_value());
  EXPECT_TRUE(finished_->ok());
  EXPECT_EQ(engine_.submissions, 0);
}

TEST_F(GenerateStreamTest, APromptOfAnOpenBatchCanBeCancelled) {
  ASSERT_TRUE(stream_->OnMessage(MoreFollow(Submit({"a", "b"}, 3))).ok());
  v1::GenerateRequest cancel;
  cancel.mutable_cancel()->add_request_ids("a");
  ASSERT_TRUE(stream_->OnMessage(cancel).ok());
  EXPECT_THAT(Failures(), testing::ElementsAre(testing::Pair("a", absl::StatusCode::kCancelled)));
  ASSERT_TRUE(stream_->OnMessage(Submit({"c"}, 3)).ok());
  EXPECT_EQ(engine_.submissions, 1);
  ASSERT_TRUE(Eventually([&] { return stream_->unfinished_sequences() == 0; }));
  EXPECT_THAT(Failures(), testing::IsEmpty());
}

TEST_F(GenerateStreamTest, ACancelledPromptLeavesItsRoomToTheRestOfTheBatch) {
  v1::GenerateRequest cancel;
  cancel.mutable_cancel()->add_request_ids("a");
  for (int i = 0; i < 3; ++i) {
    ASSERT_TRUE(stream_->OnMessage(MoreFollow(Submit({"a"}, 3, 400))).ok());
    ASSERT_TRUE(stream_->OnMessage(cancel).ok());
  }
  ASSERT_TRUE(stream_->OnMessage(Submit({"b"}, 3, 500)).ok());
  EXPECT_EQ(engine_.submissions, 1);
  ASSERT_TRUE(Eventually([&] { return stream_->unfinished_sequences() == 0; }));
  EXPECT_THAT(Failures(), testing::ElementsAre(testing::Pair("a", absl::StatusCode::kCancelled)));
}

TEST_F(GenerateStreamTest, ADrainRefusesAnOpenBatch) {
  ASSERT_TRUE(stream_->OnMessage(MoreFollow(Submit({"a"}, 3))).ok());
  stream_->Drain();
  ASSERT_TRUE(stream_->OnMessage(Submit({"b"}, 3)).ok());
  constexpr auto kAway = absl::StatusCode::kUnavailable;
  EXPECT_THAT(Failures(),
              testing::ElementsAre(testing::Pair("a", kAway), testing::Pair("b", kAway)));
  EXPECT_TRUE(finished_.has_value());
}

TEST_F(GenerateStreamTest, HeartbeatsComeOnlyWhenIdle) {
  const SteadyTime now = SteadyTime::Now();
  stream_->Tick(now, absl::Seconds(5));
  EXPECT_EQ(in_flight_, nullptr) << "too early";
  stream_->Tick(now + absl::Seconds(6), absl::Seconds(5));
  ASSERT_NE(in_flight_, nullptr);
  EXPECT_TRUE(in_flight_->has_heartbeat());
  stream_->Tick(now + absl::Seconds(60), absl::Seconds(5));
  EXPECT_EQ(outbox_.size(), 1u) << "no second one while the first is on its way";
}

TEST_F(GenerateStreamTest, EventsAfterTheEndAreDropped) {
  engine_.paused = true;
  ASSERT_TRUE(stream_->OnMessage(Submit({"a"}, 3)).ok());
  stream_->Detach();
  EXPECT_TRUE(Eventually([&] { return engine_.Stats().sequences_running == 0; }));
  EXPECT_TRUE(Eventually([&] { return stream_->unfinished_sequences() == 0; }));
  EXPECT_EQ(in_flight_, nullptr);
}

}  // namespace
}  // namespace tandem::rollout
