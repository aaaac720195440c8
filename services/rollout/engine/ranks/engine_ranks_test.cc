// A rollout server of several ranks writes what one of a single process does.
#include "services/rollout/engine/ranks/engine_ranks.h"

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "common/base/errors/error.h"
#include "common/model/testing/image_batches.h"
#include "common/ranks/communicator_group.h"
#include "common/ranks/testing/rank_processes.h"
#include "services/rollout/engine/engine.h"
#include "services/rollout/engine/ranks/ranked_runner.h"
#include "services/rollout/engine/ranks/shard_weights.h"
#include "services/rollout/engine/testing/engine_calls.h"
#include "services/rollout/engine/testing/requests.h"
#include "services/rollout/engine/testing/tiny_options.h"
#include "services/rollout/engine/testing/tiny_tokenizer.h"

namespace tandem::rollout {
namespace {

constexpr float kTolerance = 1e-5f;  // of log-probabilities, of size 1 to 10

struct Layout {
  const char* name;
  const char* family;
  bool tied = false;
  int64_t senior_ranks = 2;
  int64_t junior_ranks = 1;
  bool expert_parallel = false;  // of both models

  int ranks() const { return static_cast<int>(std::max(senior_ranks, junior_ranks)); }
};

class RolloutRanksTest : public testing::TestWithParam<Layout> {
 protected:
  void SetUp() override {
    Write("senior", 1);
    Write("junior", 2, {{"num_hidden_layers", 1}, {"hidden_size", 24}});
  }

  // Every size divides by four, and no token of a text stands for an image.
  void Write(const std::string& name, uint64_t seed,
             nlohmann::json changes = nlohmann::json::object()) const {
    changes.merge_patch({{"vocab_size", 64},
                         {"num_attention_heads", 8},
                         {"num_key_value_heads", 4},
                         {"intermediate_size", 48},
                         {"image_token_id", 62},
                         {"video_token_id", 63},
                         {"num_experts", 8},
                         {"tie_word_embeddings", GetParam().tied}});
    WriteTinyModelAndTokenizer(folder_ / name, seed, changes, GetParam().family);
  }

  EngineOptions Options() const {
    EngineOptions options = TinyOptions(folder_.path());
    options.senior.dtype = senior_dtype_;
    return options;
  }
  EngineOptions Ranked(const RankEnvironment& environment) const {
    EngineOptions options = Options();
    options.layout = {
        .tensor_parallel_size = GetParam().senior_ranks,
        .junior_tensor_parallel_size = GetParam().junior_ranks,
        .junior_gpu_devices = {},
        .enable_expert_parallel = GetParam().expert_parallel,
        .junior_enable_expert_parallel = GetParam().expert_parallel && GetParam().junior_ranks > 1};
    options.environment = environment;
    return options;
  }
  static std::unique_ptr<Engine> Create(const EngineOptions& options) {
    auto engine = CreateEngine(options);
    EXPECT_TRUE(engine.ok()) << engine.status();
    return *std::move(engine);
  }

  // `body` gets rank 0's engine and that of a single process; the other ranks follow.
  void RunRanks(const std::function<void(Engine& ranked, Engine& single)>& body) const {
    ranks::RunOnRanks(GetParam().ranks(), [&](const RankEnvironment& environment) {
      const auto engine = Create(Ranked(environment));
      if (environment.rank == 0) body(*engine, *Create(Options()));
      engine->Shutdown();
      EXPECT_EQ(engine->ended(), environment.rank > 0);
    });
  }

  const TemporaryFolder folder_;
  DType senior_dtype_ = DType::kFloat32;
};

INSTANTIATE_TEST_SUITE_P(
    Layouts, RolloutRanksTest,
    testing::Values(
        Layout{"llama_2_1", "llama"},
        Layout{.name = "tied_llama_2_2", .family = "llama", .tied = true, .junior_ranks = 2},
        Layout{.name = "mistral_2_2", .family = "mistral", .junior_ranks = 2},
        Layout{.name = "qwen2_2_2", .family = "qwen2", .junior_ranks = 2},
        Layout{.name = "tied_qwen3_2_1", .family = "qwen3", .tied = true},
        Layout{.name = "qwen3_1_2", .family = "qwen3", .senior_ranks = 1, .junior_ranks = 2},
        Layout{.name = "olmo2_2_2", .family = "olmo2", .junior_ranks = 2},
        Layout{.name = "deepseek_v3_2_2", .family = "deepseek_v3", .junior_ranks = 2},
        Layout{.name = "gemma2_2_2", .family = "gemma2", .junior_ranks = 2},
        Layout{.name = "gemma3_2_2", .family = "gemma3_text", .tied = true, .junior_ranks = 2},
        Layout{.name = "mixtral_2_2", .family = "mixtral", .junior_ranks = 2},
        Layout{.name = "tied_qwen2_moe_2_1", .family = "qwen2_moe", .tied = true},
        Layout{.name = "qwen3_moe_2_2", .family = "qwen3_moe", .junior_ranks = 2},
        Layout{.name = "tied_qwen2_vl_2_1", .family = "qwen2_vl", .tied = true},
        Layout{.name = "phi3_2_2", .family = "phi3", .junior_ranks = 2},
        Layout{.name = "experts_of_qwen2_moe_2_1", .family = "qwen2_moe", .expert_parallel = true},
        Layout{.name = "experts_of_tied_qwen3_moe_4_2",
               .family = "qwen3_moe",
               .tied = true,
               .senior_ranks = 4,
               .junior_ranks = 2,
               .expert_parallel = true},
        Layout{.name = "qwen2_5_vl_2_2", .family = "qwen2_5_vl", .junior_ranks = 2},
        Layout{.name = "llama_4_2", .family = "llama", .senior_ranks = 4, .junior_ranks = 2}),
    [](const auto& info) { return std::string(info.param.name); });

// Returns requests of all strategies, with prob_senior 0, 0.5 and 1, greedy and drawn. (A draw that
// falls within rounding of the border between two tokens may go either way: these seeds have none.)
std::vector<PromptRequest> ManyRequests() {
  std::vector<PromptRequest> requests;
  for (const SelectionStrategy strategy : kStrategies) {
    for (const double prob_senior : {0.0, 0.5, 1.0}) {
      for (const double temperature : {0.0, 1.0}) {
        requests.push_back(RequestOf({.selection_strategy = strategy, .prob_senior = prob_senior},
                                     requests.size()));
        requests.back().sampling.temperature = temperature;
        requests.back().num_samples = 2;
        requests.back().return_other_logprobs = true;
      }
    }
  }
  return requests;
}

// Adds an image to some of the prompts, if the models take images. Two of them share one.
void AddImages(const Engine& engine, std::vector<PromptRequest>& requests) {
  const auto& vision = engine.Info().senior.vision;
  if (!vision.has_value()) return;
  for (size_t i = 0; i < requests.size(); i += 5) {
    const std::string digest = i % 2 == 0 ? "even" : "odd";
    const VisionGrid grid = {.height = 4, .width = 6};
    PromptRequest& request = requests[i];
    request.prompt_token_ids.insert(request.prompt_token_ids.begin() + 2,
                                    static_cast<size_t>(vision->Rows(grid)),
                                    static_cast<int32_t>(vision->image_token_id));
    request.vision_inputs = {
        {.digest = digest, .grid_t = 1, .grid_h = grid.height, .grid_w = grid.width}};
    request.blobs[digest] = RandomPixels(*vision, grid, digest.size());
  }
}

std::vector<Trajectory> RunAll(Engine& engine, const std::vector<PromptRequest>& requests) {
  std::vector<Trajectory> trajectories;
  for (const auto& listener : Submit(engine, requests)) {
    listener->Wait();
    EXPECT_EQ(listener->failure(), std::nullopt);
    for (const auto& [index, trajectory] : listener->finished()) {
      trajectories.push_back(trajectory);
    }
  }
  return trajectories;
}

void ExpectNear(const std::vector<float>& a, const std::vector<float>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) EXPECT_NEAR(a[i], b[i], kTolerance) << i;
}

void ExpectSame(const std::vector<Trajectory>& ranked, const std::vector<Trajectory>& single) {
  ASSERT_FALSE(single.empty());
  ASSERT_EQ(ranked.size(), single.size());
  for (size_t i = 0; i < single.size(); ++i) {
    SCOPED_TRACE(i);
    EXPECT_EQ(ranked[i].response_token_ids, single[i].response_token_ids);
    EXPECT_EQ(ranked[i].authorship_mask, single[i].authorship_mask);
    EXPECT_EQ(ranked[i].senior_versions, single[i].senior_versions);
    EXPECT_EQ(ranked[i].junior_version, single[i].junior_version);
    EXPECT_EQ(ranked[i].routed_experts, single[i].routed_experts);
    ExpectNear(ranked[i].author_logprobs, single[i].author_logprobs);
    ExpectNear(ranked[i].other_logprobs, single[i].other_logprobs);
  }
}

ScoreRequest SomeScores() {
  ScoreRequest request = {.sequences = {}, .senior = true, .junior = true, .temperature = 2};
  for (int i = 0; i < 12; ++i) {
    ScoreSequence sequence = {.token_ids = {}, .first_scored_token = 1 + i % 4};
    for (int j = 0; j < 5 + 8 * i; ++j) sequence.token_ids.push_back((i * 31 + j * 17) % 61);
    request.sequences.push_back(sequence);
  }
  return request;
}

void ExpectSameScores(Engine& ranked, Engine& single) {
  const auto a = Score(ranked, SomeScores()), b = Score(single, SomeScores());
  ASSERT_TRUE(a.ok()) << a.status();
  ASSERT_TRUE(b.ok()) << b.status();
  EXPECT_EQ(a->weights, b->weights);
  for (size_t i = 0; i < b->sequences.size(); ++i) {
    SCOPED_TRACE(i);
    ExpectNear(a->sequences[i].senior_logprobs, b->sequences[i].senior_logprobs);
    ExpectNear(a->sequences[i].junior_logprobs, b->sequences[i].junior_logprobs);
  }
}

// Sends the weights of the model in `directory` in `types`, up to the commit, and returns their
// manifest.
WeightManifest Stage(Engine& engine, const std::string& directory, const TensorTypes& types = {}) {
  const auto replacement = *Model::Load(directory);
  std::vector<std::byte> stream;
  WeightManifest manifest = ManifestOf(*replacement, 3, stream, types);
  EXPECT_TRUE(engine.weights().Begin("u", manifest, false).ok());
  EXPECT_TRUE(engine.weights().Append("u", 0, stream).ok());
  return manifest;
}

TEST_P(RolloutRanksTest, ResponsesAreThoseOfOneProcess) {
  RunRanks([](Engine& ranked, Engine& single) {
    std::vector<PromptRequest> requests = ManyRequests();
    for (size_t i = 0; i < requests.size(); i += 2) {
      requests[i].return_routed_experts = true;
      if (!single.Validate(requests[i]).ok()) requests[i].return_routed_experts = false;  // dense
    }
    AddImages(single, requests);
    ExpectSame(RunAll(ranked, requests), RunAll(single, requests));
    EXPECT_EQ(ranked.Info().junior_version, single.Info().junior_version);
    EXPECT_EQ(ranked.Info().senior.num_parameters, single.Info().senior.num_parameters);
  });
}

TEST_P(RolloutRanksTest, TheRankWithTheLeastMemorySizesTheCache) {
  ranks::RunOnRanks(GetParam().ranks(), [&](const RankEnvironment& environment) {
    EngineOptions options = Ranked(environment);
    // The last rank has memory for one sequence of each model that it holds.
    options.free_memory.host = int64_t{1} << 40;
    if (environment.rank == environment.world_size - 1) options.free_memory.host = 1;
    const auto engine = Create(options);
    const bool limits_senior = GetParam().senior_ranks == GetParam().ranks();
    // Blocks of 128 tokens, the longest sequence, and as many for scores.
    EXPECT_EQ(engine->Stats().kv_capacity_tokens,
              (limits_senior ? 1 : options.max_num_seqs) * 128 + 128);
    if (environment.rank == 0) {
      const auto single = Create(Options());
      ExpectSame(RunAll(*engine, {RequestOf({})}), RunAll(*single, {RequestOf({})}));
    }
    engine->Shutdown();
  });
}

TEST_P(RolloutRanksTest, ScoresAreThoseOfOneProcess) {
  RunRanks([](Engine& ranked, Engine& single) { ExpectSameScores(ranked, single); });
}

TEST_P(RolloutRanksTest, ARowsBitsDoNotDependOnItsBatch) {
  RunRanks([](Engine& ranked, Engine&) {
    const std::vector<PromptRequest> requests = ManyRequests();
    const std::vector<Trajectory> together = RunAll(ranked, requests);
    ASSERT_EQ(together.size(), 2 * requests.size());
    for (size_t i = 0; i < requests.size(); ++i) {
      const std::vector<Trajectory> alone = RunAll(ranked, {requests[i]});
      for (size_t sample = 0; sample < alone.size(); ++sample) {
        EXPECT_EQ(alone[sample].response_token_ids, together[2 * i + sample].response_token_ids);
        EXPECT_EQ(alone[sample].author_logprobs, together[2 * i + sample].author_logprobs);
      }
    }
  });
}

TEST_P(RolloutRanksTest, EveryRankTakesNewWeights) {
  Write("other", 6);
  RunRanks([&](Engine& ranked, Engine& single) {
    for (Engine* engine : {&ranked, &single}) {
      const WeightManifest manifest = Stage(*engine, folder_ / "other");
      const auto committed = engine->weights().Commit("u", {});
      ASSERT_TRUE(committed.ok()) << committed.status();
      EXPECT_EQ(committed->digest, manifest.digest);
    }
    const std::vector<PromptRequest> requests = ManyRequests();
    ExpectSame(RunAll(ranked, requests), RunAll(single, requests));
    ExpectSameScores(ranked, single);
  });
}

TEST_P(RolloutRanksTest, EveryRankTakesWeightsThatTheSenderRounded) {
  senior_dtype_ = DType::kBFloat16;
  Write("other", 6);
  RunRanks([&](Engine& ranked, Engine& single) {
    const TensorTypes types = ranked.weights().WantedTypes();
    EXPECT_FALSE(types.empty());
    EXPECT_EQ(types, single.weights().WantedTypes());
    Stage(ranked, folder_ / "other", types);
    Stage(single, folder_ / "other");
    const auto committed = ranked.weights().Commit("u", {});
    ASSERT_TRUE(committed.ok()) << committed.status();
    EXPECT_EQ(committed->digest, single.weights().Commit("u", {})->digest);
    const std::vector<PromptRequest> requests = ManyRequests();
    ExpectSame(RunAll(ranked, requests), RunAll(single, requests));
    ExpectSameScores(ranked, single);
  });
}

TEST_P(RolloutRanksTest, AShardKeepsItsWeightsWhileOthersArePackedBesideThem) {
  Write("other", 6);
  const auto load = [&](const char* name, const Placement& placement) {
    return Model::Load(folder_ / name, {.placement = placement}).value();
  };
  const auto expect_values = [](const Model& model, const Model& expected) {
    for (size_t i = 0; i < expected.DeclaredParameters().size(); ++i) {
      const Parameter& parameter = expected.DeclaredParameters()[i];
      if (!parameter.held()) continue;  // an expert of another rank
      EXPECT_TRUE(
          at::equal(model.DeclaredParameters()[i].ComputedValue(), parameter.ComputedValue()))
          << parameter.spec.name;
    }
  };
  ranks::RunOnRanks(GetParam().ranks(), [&](const RankEnvironment& environment) {
    const EngineRanks ranks = JoinRanks(Ranked(environment)).value();
    EXPECT_EQ(ranks.senior.weights_group != nullptr, ranks.senior.sharded());
    if (ranks.senior.sharded()) {
      const Placement& shard = ranks.senior.placement;
      const auto model = load("senior", shard);
      const auto before = load("senior", shard), after = load("other", shard);
      std::vector<KeptTensor> tensors;
      for (const auto& [name, values] : load("other", {})->Parameters()) {
        tensors.push_back(
            {.spec = {.name = name, .shape = values.sizes().vec()}, .values = values});
      }
      const RankedWeights weights = WeightsToSend(tensors, *model);
      std::optional<ShardUpdate> update;
      if (environment.rank > 0) {
        update.emplace(weights, *ranks.senior.weights_group, *model, *ranks.server, std::nullopt);
      }
      ranks.senior.group->Barrier();  // nobody waits for the tensors
      if (environment.rank == 0) {
        EXPECT_TRUE(SendWeights(weights, tensors, *ranks.senior.weights_group).ok());
      }
      ranks.senior.group->Barrier();
      if (environment.rank > 0) {
        expect_values(*model, *before);
        update->AdoptInto(*model);
        expect_values(*model, *after);
      }
    }
    ranks.server->world()->Barrier();
  });
}

// Tells of every token that is written, and holds the engine a moment until an update was
// committed.
class SlowListener final : public PromptListener {
 public:
  void OnTokens(TokensDelta) override {
    std::unique_lock lock(mutex_);
    began_ = true;
    changed_.notify_all();
    changed_.wait_for(lock, std::chrono::milliseconds(20), [&] { return committed_; });
  }
  void OnFinished(Trajectory trajectory, SampleDrafts) override {
    finished_.set_value(std::move(trajectory));
  }
  void OnFailed(absl::Status status) override { ADD_FAILURE() << status; }

  void WaitUntilBegun() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return began_; });
  }
  void Committed() {
    const std::lock_guard lock(mutex_);
    committed_ = true;
    changed_.notify_all();
  }
  Trajectory WaitUntilFinished() { return finished_.get_future().get(); }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool began_ = false, committed_ = false;
  std::promise<Trajectory> finished_;
};

// Wherever in the response the update came, each token is what its weights write after all before.
TEST_P(RolloutRanksTest, WeightsChangeInTheMiddleOfAResponse) {
  Write("other", 5);
  RunRanks([&](Engine& ranked, Engine& single) {
    Stage(ranked, folder_ / "other");
    PromptRequest request = RequestOf({.prob_senior = 1.0}, 3);
    request.sampling.max_tokens = 100;
    request.sampling.ignore_eos = true;
    request.stream_tokens = true;
    const auto listener = std::make_shared<SlowListener>();
    ASSERT_TRUE(ranked.Submit({{request, listener}}).ok());
    listener->WaitUntilBegun();
    const absl::Status committed = ranked.weights().Commit("u", {}).status();
    listener->Committed();
    EXPECT_TRUE(committed.ok()) << committed;
    const Trajectory t = listener->WaitUntilFinished();
    ASSERT_EQ(t.senior_versions.size(), 2u);
    EXPECT_EQ(t.senior_versions[1].weights.version, 3);

    ScoreSequence sequence = {
        .token_ids = t.prompt_token_ids,
        .first_scored_token = static_cast<int64_t>(t.prompt_token_ids.size())};
    sequence.token_ids.insert(sequence.token_ids.end(), t.response_token_ids.begin(),
                              t.response_token_ids.end());
    const auto before = Score(single, {.sequences = {sequence}});
    Stage(single, folder_ / "other");
    ASSERT_TRUE(single.weights().Commit("u", {}).ok());
    const auto after = Score(single, {.sequences = {sequence}});
    std::vector<float> expected = before->sequences[0].senior_logprobs;
    const std::vector<float>& rest = after->sequences[0].senior_logprobs;
    std::copy(rest.begin() + t.senior_versions[0].count, rest.end(),
              expected.begin() + t.senior_versions[0].count);
    ExpectNear(t.author_logprobs, expected);
  });
}

TEST_P(RolloutRanksTest, RanksThatDifferDoNotStart) {
  Write("other", 5);
  const auto start_with = [&](const std::function<void(EngineOptions&)>& change_of_last) {
    return [&](const RankEnvironment& environment) {
      EngineOptions options = Ranked(environment);
      options.configuration = "max_model_len: 128";
      if (environment.rank == GetParam().ranks() - 1) change_of_last(options);
      return CreateEngine(options).status();
    };
  };
  const std::string last = absl::StrCat("rank ", GetParam().ranks() - 1);
  ranks::RunOnRanks(GetParam().ranks(), [&](const RankEnvironment& environment) {
    const absl::Status status = start_with(
        [](EngineOptions& options) { options.configuration = "max_model_len: 256"; })(environment);
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_EQ(status.message(), absl::StrCat(last,
                                             " has another configuration: 'max_model_len: 256', "
                                             "where rank 0 has 'max_model_len: 128'"));
  });
  for (const std::string lane : {"senior", "junior"}) {
    ranks::RunOnRanks(GetParam().ranks(), [&](const RankEnvironment& environment) {
      const absl::Status status = start_with([&](EngineOptions& options) {
        (lane == "senior" ? options.senior.model : options.junior.model) = folder_ / "other";
      })(environment);
      EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
      EXPECT_TRUE(
          absl::StartsWith(status.message(), absl::StrCat(last, " has another ", lane, ".model: ")))
          << status;
    });
  }
  ranks::RunOnRanks(GetParam().ranks(), [&](const RankEnvironment& environment) {
    const absl::Status status =
        start_with([](EngineOptions& options) { options.senior.model = "/nowhere"; })(environment);
    EXPECT_EQ(FieldPath(status), "senior.model");
    EXPECT_TRUE(absl::StartsWith(status.message(), last + ": ")) << status;
  });
}

TEST(RankedRunnerTest, AnErrorOfARequestLeavesTheRanksInStep) {
  ranks::RunOnRanks(2, [](const RankEnvironment& environment) {
    const auto ranks =
        ranks::ServerRanks::Connect({.environment = environment, .timeouts = kTestTimeouts})
            .value();
    const auto group = std::make_shared<ranks::CommunicatorGroup>(ranks->world());
    const nlohmann::json config = {{"vocab_size", 64}, {"intermediate_size", 48}};
    const auto make = [&](const Placement& placement) {
      return TorchRunner(TinyModel("llama", config, {.placement = placement}), /*num_blocks=*/2,
                         DType::kFloat32);
    };
    const c10::InferenceMode inference_mode;
    TorchRunner shard =
        make({.shard_index = group->rank(), .shard_count = 2, .shard_group = group});
    if (environment.rank == 1) {
      ranks::CommandTable commands;
      commands.Add<RankedPass>(kPassCommand, [&](const std::string&, const RankedPass& pass) {
        std::map<uint64_t, PromptImages> images;
        return FollowPass(pass, shard, images);
      });
      ranks->Follow(commands, [](const std::string&, absl::FunctionRef<absl::Status()> execute) {
        return execute();
      });
      return;
    }
    TorchRunner whole = make({});
    RankedRunner ranked(Author::kSenior, ranks.get(), &shard);
    // The same passes of both runners, and the log-probs of token 3 that they give.
    const SamplingParams sampling;
    const auto run = [&](ModelRunner& runner, const DecodeInput& sequence,
                         const std::vector<BlockCopy>& copies, std::vector<float>& logprobs) {
      const std::vector<OutputRow> rows(sequence.output_rows.size(),
                                        {.token = 3, .sampling = &sampling});
      PassResults results;
      absl::Status status =
          runner.Run({.copies = copies, .sequences = {&sequence, 1}, .rows = rows}, results);
      if (status.ok()) {
        for (const auto& result : results) logprobs.push_back(result->logprob);
      }
      return status;
    };
    const std::vector<int32_t> outside = {5, 64}, prompt = {5, 6, 7, 8}, more = {9, 10};
    const std::vector<int32_t> first = {0}, second = {1}, unknown = {2};
    const std::vector<int64_t> rows = {0, 1};
    std::vector<std::vector<float>> logprobs(2);
    size_t which = 0;
    for (ModelRunner* runner :
         {static_cast<ModelRunner*>(&ranked), static_cast<ModelRunner*>(&whole)}) {
      std::vector<float>& of_runner = logprobs[which++];
      EXPECT_EQ(run(*runner, {first, 0, outside, rows}, {}, of_runner).code(),
                absl::StatusCode::kInvalidArgument);
      EXPECT_EQ(run(*runner, {unknown, 0, prompt, rows}, {}, of_runner).code(),
                absl::StatusCode::kInvalidArgument);
      EXPECT_TRUE(run(*runner, {first, 0, prompt, {}}, {}, of_runner).ok());
      // Continues a copy of the first three tokens.
      EXPECT_TRUE(run(*runner, {second, 3, more, rows}, {{.from = 0, .to = 1}}, of_runner).ok());
    }
    ASSERT_EQ(logprobs[1].size(), 2u);
    ExpectNear(logprobs[0], logprobs[1]);
    ranks->AnnounceEnd();
  });
}

}  // namespace
}  // namespace tandem::rollout
