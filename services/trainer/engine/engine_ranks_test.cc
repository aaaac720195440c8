// A multi-rank trainer has the results of a single process.
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <functional>
#include <iterator>
#include <memory>
#include <nlohmann/json.hpp>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "common/base/errors/error.h"
#include "common/model/testing/image_batches.h"
#include "common/model/testing/padded_model.h"
#include "common/parallel/testing/zero_of_stage.h"
#include "common/ranks/testing/rank_processes.h"
#include "services/trainer/engine/testing/engine_fixture.h"
#include "services/trainer/engine/testing/same_report.h"

namespace tandem::trainer {
namespace {

struct Layout {
  const char* name;
  parallel::StrategyOptions strategy;
  int ranks = 2;

  friend void PrintTo(const Layout& layout, std::ostream* out) { *out << layout.name; }
};

class TrainerRanksTest : public TrainerEngineTest, public ::testing::WithParamInterface<Layout> {
 protected:
  // The vocabularies of both models have 61 tokens, and padding rows. The width of the MLP is one
  // that two ranks divide.
  TrainerRanksTest() {
    WriteTinyModel(folder_ / "plain", /*seed=*/3, {{"intermediate_size", 44}});
    WriteTinyModel(folder_ / "plain_junior", /*seed=*/8, {{"hidden_size", 32}, {"head_dim", 8}});
    for (const char* name : {"plain", "plain_junior"}) WriteTokenizer(folder_ / name, 61);
    std::filesystem::remove_all(folder_ / "model");
    WritePaddedModel(folder_ / "plain", folder_ / "model", 65);
    WritePaddedModel(folder_ / "plain_junior", folder_ / "junior", 62);
  }

  // Larger steps amplify differences in the last bits.
  EngineOptions Options() const {
    EngineOptions options = TrainerEngineTest::Options();
    options.optimizer.learning_rate = 1e-3;
    options.optimizer.epsilon = 1e-5;
    return options;
  }

  EngineOptions Ranked(const RankEnvironment& environment) const {
    EngineOptions options = Options();
    options.environment = environment;
    options.strategy = GetParam().strategy;
    options.strategy.megatron.use_distributed_optimizer = true;
    options.rank_timeouts.silence = absl::Seconds(5);
    return options;
  }

  // Calls `body` with rank 0's engine; the other ranks follow.
  void RunRanks(const std::function<void(EngineOptions&)>& change,
                const std::function<void(Engine& engine, FakeCritic& critic)>& body) const {
    ranks::RunOnRanks(GetParam().ranks, [&](const RankEnvironment& environment) {
      EngineOptions options = Ranked(environment);
      change(options);
      const auto critic = std::make_shared<FakeCritic>();
      const auto engine = Make(options, critic);
      if (environment.rank == 0) body(*engine, *critic);
      engine->Shutdown();
      EXPECT_EQ(engine->ended(), environment.rank > 0);
      EXPECT_EQ(critic->version > 0, environment.rank == 0 && asks_critic_);
      EXPECT_EQ(engine->Info().weights.version, expected_version_);
    });
  }

  // Makes the request of a step; the engine is a process that shares no prefixes.
  using MakeRequest = std::function<TrainStepRequest(Engine& apart, int64_t step)>;
  void ExpectSharingChangesNothing(const std::function<void(EngineOptions&)>& change,
                                   const std::vector<MakeRequest>& steps);

  bool asks_critic_ = false;
  int64_t expected_version_ = 0;
};

INSTANTIATE_TEST_SUITE_P(
    Layouts, TrainerRanksTest,
    ::testing::Values(
        Layout{"zero_1", {.name = "zero", .zero = parallel::ZeroOfStage(1)}},
        Layout{"zero_2", {.name = "zero", .zero = parallel::ZeroOfStage(2)}},
        Layout{"zero_3", {.name = "zero", .zero = parallel::ZeroOfStage(3)}},
        Layout{"tensor_2", {.name = "megatron", .megatron = {.tensor_model_parallel_size = 2}}},
        Layout{"pipeline_2", {.name = "megatron", .megatron = {.pipeline_model_parallel_size = 2}}},
        Layout{"context_2", {.name = "megatron", .megatron = {.context_parallel_size = 2}}},
        Layout{"data_2", {.name = "megatron"}},
        Layout{"tensor_2_context_2",
               {.name = "megatron",
                .megatron = {.tensor_model_parallel_size = 2, .context_parallel_size = 2}},
               4}),
    [](const auto& info) { return std::string(info.param.name); });

TrainStepRequest RequestOf(int64_t step) {
  TrainStepRequest request = TestRequest();
  request.step = step;
  request.request_id = request.payload_digest = std::to_string(step);
  request.expected_version = step - 1;
  return request;
}

TrainStepRequest SupervisedOf(int64_t step) {
  TrainStepRequest request = RequestOf(step);
  SupervisedBatch batch;
  for (const PolicySample& sample : TestBatch().samples) {
    batch.samples.push_back(
        {sample.trajectory.prompt_token_ids, sample.trajectory.response_token_ids});
  }
  request.batch = batch;
  return request;
}

// Weights of both signs, and an optimizer of the step's own.
TrainStepRequest WeightedOf(int64_t step) {
  TrainStepRequest request = SupervisedOf(step);
  auto& batch = std::get<SupervisedBatch>(request.batch);
  batch.objective.aggregation = loss::Aggregation::kTokenSum;
  for (SupervisedSample& sample : batch.samples) {
    for (size_t t = 0; t < sample.response_token_ids.size(); ++t) {
      sample.weights.push_back(0.25f * static_cast<float>(t % 4) - 0.25f);
    }
  }
  request.optimizer = {.learning_rate = 2e-3, .beta2 = 0.95, .max_grad_norm = 0.5};
  return request;
}

TEST_P(TrainerRanksTest, WeightedStepsAreThoseOfOneProcess) {
  expected_version_ = 2;
  const auto change = [](EngineOptions& options) { options.micro_batch_tokens = 12; };
  RunRanks(change, [&](Engine& engine, FakeCritic&) {
    EngineOptions options = Options();
    change(options);
    const auto single = Make(options);
    for (int64_t step = 1; step <= 2; ++step) {
      const TrainStepRequest request = WeightedOf(step);
      ExpectSameReport(Step(engine, request), Step(*single, request));
    }
  });
}

TEST_P(TrainerRanksTest, LogProbsOfTheReferenceAreThoseOfOneProcess) {
  const auto change = [this](EngineOptions& options) {
    options.reference_model = folder_ / "plain";  // the model without its padding rows
    options.micro_batch_tokens = 12;
  };
  for (const bool adapters : {false, true}) {
    const auto change_all = [&](EngineOptions& options) {
      change(options);
      if (!adapters) return;
      options.reference_model = {};
      options.lora = {.rank = 4, .alpha = 8, .target_modules = {kAllLinear}};
    };
    expected_version_ = 1;
    RunRanks(change_all, [&](Engine& engine, FakeCritic&) {
      EngineOptions options = Options();
      change_all(options);
      const auto single = Make(options);
      const TrainStepRequest step = WeightedOf(1);
      ExpectSameReport(Step(engine, step), Step(*single, step));
      LogProbsBatch batch;
      for (const PolicySample& sample : TestBatch().samples) {
        for (const bool reference : {true, false}) {
          batch.requests.push_back({.prompt_token_ids = sample.trajectory.prompt_token_ids,
                                    .response_token_ids = sample.trajectory.response_token_ids,
                                    .reference = reference});
        }
      }
      const auto a = engine.ComputeLogProbs({}, batch).value();
      const auto b = single->ComputeLogProbs({}, batch).value();
      ASSERT_TRUE(a.error.ok()) << a.error;
      ASSERT_EQ(a.results.size(), b.results.size());
      for (size_t i = 0; i < a.results.size(); ++i) {
        for (size_t t = 0; t < a.results[i].logprobs.size(); ++t) {
          EXPECT_NEAR(a.results[i].logprobs[t], b.results[i].logprobs[t], 1e-4);
        }
      }
      EXPECT_NE(b.results[0].logprobs, b.results[1].logprobs);
    });
  }
}

TEST_P(TrainerRanksTest, PolicyStepsAreThoseOfOneProcess) {
  expected_version_ = 4;
  const auto change = [](EngineOptions& options) {
    options.reference_model = options.model;
    options.micro_batch_tokens = 12;
  };
  RunRanks(change, [&](Engine& engine, FakeCritic&) {
    EngineOptions options = Options();
    change(options);
    const auto single = Make(options);
    EXPECT_EQ(Digest(engine), Digest(*single));
    for (int64_t step = 1; step <= 4; ++step) {
      TrainStepRequest request = RequestOf(step);
      auto& batch = std::get<PolicyBatch>(request.batch);
      batch.objective.loss.kl_estimator = loss::KlEstimator::kK3;
      batch.objective.loss.kl_coefficient = 0.1;
      batch.objective.loss.entropy_coefficient = step % 2 == 0 ? 0.01 : 0;
      if (step == 3) batch.objective.old_logprobs = OldLogprobs::kRecomputed;
      if (step == 4) batch.objective.updates = {.num_mini_batches = 2, .num_epochs = 2};
      RecordLogProbs(*single, batch);
      const StepResult ranked = Step(engine, request);
      ExpectSameReport(ranked, Step(*single, request));
      const StepResult again = Step(engine, request);
      EXPECT_TRUE(again.replayed);
      EXPECT_EQ(again.report, ranked.report);
    }
    const Trajectory t = TestBatch().samples[3].trajectory;
    const auto a = LogProbsOf(engine, t.prompt_token_ids, t.response_token_ids);
    const auto b = LogProbsOf(*single, t.prompt_token_ids, t.response_token_ids);
    for (size_t i = 0; i < a.size(); ++i) EXPECT_NEAR(a[i], b[i], 1e-4);
  });
}

// Returns changes of the objective, or of who wrote the tokens, to be made one at a time.
std::vector<std::function<void(PolicyBatch& batch)>> Variants() {
  using Objective = PolicyObjective;
  const auto objective = [](const std::function<void(Objective&)>& change) {
    return [change](PolicyBatch& batch) { change(batch.objective); };
  };
  const auto written_by = [](Author author) {
    return [author](PolicyBatch& batch) {
      batch.objective.junior_token_loss_weight = 1;
      for (PolicySample& sample : batch.samples) {
        std::vector<Author>& mask = sample.trajectory.authorship_mask;
        mask.assign(mask.size(), author);
      }
    };
  };
  return {
      written_by(Author::kSenior),
      written_by(Author::kJunior),
      objective([](Objective& o) { o.loss.kind = loss::PolicyLossKind::kGspo; }),
      objective([](Objective& o) { o.loss.kind = loss::PolicyLossKind::kCispo; }),
      objective([](Objective& o) { o.loss.dual_clip = 3; }),
      objective([](Objective& o) {
        o.old_logprobs = OldLogprobs::kRecomputed;
        o.loss.importance_sampling_cap = 2;
      }),
      objective([](Objective& o) {
        o.junior_token_loss_weight = 0.5;
        o.loss.importance_sampling_cap = 2;
        o.loss.importance_sampling_level = loss::ImportanceSamplingLevel::kSequence;
      }),
      [](PolicyBatch& batch) {
        batch.objective.loss.off_policy_mask_threshold = 0.1;
        // Every other sample was drawn from 0.7 of the mass: its mean is 0.36.
        for (size_t i = 0; i < batch.samples.size(); i += 2) {
          Trajectory& trajectory = batch.samples[i].trajectory;
          trajectory.log_keep_mass.assign(trajectory.author_logprobs.size(), std::log(0.7f));
        }
      },
      objective([](Objective& o) { o.old_logprobs = OldLogprobs::kAuthor; }),
      objective([](Objective& o) {
        o.loss.kl_estimator = loss::KlEstimator::kK1;
        o.loss.kl_coefficient = 0.1;
        o.kl_placement = KlPlacement::kReward;
      }),
      objective([](Objective& o) {
        o.loss.kl_estimator = loss::KlEstimator::kK2;
        o.loss.kl_coefficient = 0.1;
      }),
      objective(
          [](Objective& o) { o.advantage_estimator = AdvantageEstimator::kReinforcePlusPlus; }),
      objective([](Objective& o) { o.whiten_advantages = true; }),
      objective([](Objective& o) {
        o.junior_kl_coefficient = 0.1;
        o.junior_kl_kind = TeacherDirection::kForwardSampled;
      }),
      objective([](Objective& o) {
        o.junior_kl_coefficient = 0.1;
        o.junior_kl_kind = TeacherDirection::kReverse;
      }),
      objective([](Objective& o) {
        o.junior_kl_coefficient = 0.1;
        o.junior_kl_kind = TeacherDirection::kForward;
      }),
      objective([](Objective& o) { o.scale.aggregation = loss::Aggregation::kSeqMeanTokenMean; }),
      [](PolicyBatch& batch) { Distil(batch, loss::DivergenceKind::kReverse); },
      [](PolicyBatch& batch) {
        Distil(batch, loss::DivergenceKind::kForward, /*top_k=*/60);
        batch.objective.junior_token_loss_weight = 0.5;
      },
      [](PolicyBatch& batch) { Distil(batch, loss::DivergenceKind::kJensenShannon); },
      objective([](Objective& o) { o.distillation = {.coefficient = 0.7}; }),
      objective([](Objective& o) {
        o.distillation = {.coefficient = 0.7,
                          .divergence = {.kind = loss::DivergenceKind::kJensenShannon}};
        // Beside another teacher.
        o.junior_kl_coefficient = 0.1;
      }),
  };
}

// Puts an image in front of every prompt.
void AddImages(const VisionConfig& vision, TrainStepRequest& request) {
  const VisionGrid grid = {1, 4, 4};
  uint64_t seed = 0;
  for (PolicySample& sample : std::get<PolicyBatch>(request.batch).samples) {
    const VisionInput image = RandomImage(vision, {.grid = grid}, seed++ / 2);
    std::vector<int32_t>& prompt = sample.trajectory.prompt_token_ids;
    prompt.insert(prompt.begin(), static_cast<size_t>(vision.Rows(grid)),
                  static_cast<int32_t>(vision.image_token_id));
    prompt.insert(prompt.begin(), 1);
    sample.trajectory.vision_inputs = {{.digest = image.digest,
                                        .grid_t = grid.frames,
                                        .grid_h = grid.height,
                                        .grid_w = grid.width}};
    request.blobs.emplace(image.digest, image.pixels);
  }
}

// The reference runs on whole micro-batches, the junior beside the loss.
TEST_P(TrainerRanksTest, EveryModelReadsTheImagesOfItsBatches) {
  const nlohmann::json width = {{"intermediate_size", 44}};
  WriteTinyModel(folder_ / "vision", /*seed=*/3, width, "qwen2_vl");
  WriteTinyModel(folder_ / "vision_junior", /*seed=*/8, width, "qwen2_vl");
  const VisionConfig vision = *TinyModel("qwen2_vl", width)->config().vision;
  const auto change = [this](EngineOptions& options) {
    options.model = options.reference_model = folder_ / "vision";
    options.junior_model = folder_ / "vision_junior";
    options.micro_batch_tokens = 24;
  };
  const TeacherDirection kinds[] = {TeacherDirection::kReverse, TeacherDirection::kForward,
                                    TeacherDirection::kForwardSampled};
  expected_version_ = std::size(kinds);
  RunRanks(change, [&](Engine& engine, FakeCritic&) {
    EngineOptions options = Options();
    change(options);
    const auto single = Make(options);
    int64_t step = 0;
    for (const TeacherDirection kind : kinds) {
      SCOPED_TRACE(step);
      TrainStepRequest request = RequestOf(++step);
      AddImages(vision, request);
      PolicyObjective& objective = std::get<PolicyBatch>(request.batch).objective;
      objective.old_logprobs = OldLogprobs::kRecomputed;
      objective.loss.kl_estimator = loss::KlEstimator::kK3;
      objective.loss.kl_coefficient = 0.1;
      objective.junior_kl_coefficient = 0.1;
      objective.junior_kl_kind = kind;
      const StepResult ranked = Step(engine, request);
      EXPECT_NE(ranked.report.metrics.at("loss/junior_kl"), 0);
      ExpectSameReport(ranked, Step(*single, request));
    }
  });
}

TEST_P(TrainerRanksTest, AdaptersLearnFromATeacherAsInOneProcess) {
  const loss::DivergenceKind kinds[] = {loss::DivergenceKind::kReverse,
                                        loss::DivergenceKind::kForward,
                                        loss::DivergenceKind::kJensenShannon};
  expected_version_ = 2 * std::size(kinds);
  const auto change = [this](EngineOptions& options) {
    options.teacher_model = folder_ / "junior";
    options.lora = {.rank = 4, .alpha = 8, .target_modules = {kAllLinear}, .seed = 4};
  };
  RunRanks(change, [&](Engine& engine, FakeCritic&) {
    EngineOptions options = Options();
    change(options);
    const auto single = Make(options);
    int64_t step = 0;
    for (const loss::DivergenceKind kind : kinds) {
      for (const int64_t top_k : {0, 4}) {
        SCOPED_TRACE(step);
        TrainStepRequest request = RequestOf(++step);
        auto& batch = std::get<PolicyBatch>(request.batch);
        RecordLogProbs(*single, batch);
        Distil(batch, kind, top_k);
        ExpectSameReport(Step(engine, request), Step(*single, request));
      }
    }
  });
}

// With adapters, too, beside which the reference model may be the model without them.
TEST_P(TrainerRanksTest, EveryObjectiveIsThatOfOneProcess) {
  const auto variants = Variants();
  expected_version_ = static_cast<int64_t>(variants.size()) + 1;
  for (const bool adapters : {false, true}) {
    SCOPED_TRACE(adapters ? "adapters" : "whole");
    const auto change = [&](EngineOptions& options) {
      options.junior_model = options.teacher_model = folder_ / "junior";
      if (adapters) {
        options.lora = {.rank = 4, .alpha = 8, .target_modules = {kAllLinear}, .seed = 4};
      } else {
        options.reference_model = options.model;
      }
    };
    RunRanks(change, [&](Engine& engine, FakeCritic&) {
      EngineOptions options = Options();
      change(options);
      const auto single = Make(options);
      int64_t step = 0;
      for (const auto& variant : variants) {
        SCOPED_TRACE(absl::StrCat("variant ", step));
        TrainStepRequest request = RequestOf(++step);
        auto& batch = std::get<PolicyBatch>(request.batch);
        RecordLogProbs(*single, batch);
        variant(batch);
        ExpectSameReport(Step(engine, request), Step(*single, request));
      }
      const TrainStepRequest supervised = SupervisedOf(++step);
      ExpectSameReport(Step(engine, supervised), Step(*single, supervised));
    });
  }
}

// Expects the steps of ranks whose micro-batches share prefixes to be those of one process whose
// do not. Micro-batches hold two or three sequences.
void TrainerRanksTest::ExpectSharingChangesNothing(
    const std::function<void(EngineOptions&)>& change, const std::vector<MakeRequest>& steps) {
  if (GetParam().strategy.megatron.context_parallel_size > 1) {
    GTEST_SKIP() << "context parallelism does not support shared prefixes";
  }
  expected_version_ = std::ssize(steps);
  const auto share = [&](EngineOptions& options) {
    options.micro_batch_tokens = 30;
    change(options);
    options.shared_prefixes = true;
  };
  RunRanks(share, [&](Engine& engine, FakeCritic&) {
    EngineOptions options = Options();
    share(options);
    options.shared_prefixes = false;
    const auto apart = Make(options);
    for (int64_t step = 1; step <= std::ssize(steps); ++step) {
      SCOPED_TRACE(absl::StrCat("step ", step));
      const TrainStepRequest request = steps[static_cast<size_t>(step) - 1](*apart, step);
      StepResult shared = Step(engine, request);
      EXPECT_GT(shared.report.metrics["policy/shared_token_fraction"], 0.1);
      shared.report.metrics.erase("policy/shared_token_fraction");
      ExpectSameReport(shared, Step(*apart, request));
    }
  });
}

TEST_P(TrainerRanksTest, SharedPrefixesChangeNoObjective) {
  std::vector<MakeRequest> steps;
  for (const auto& variant : Variants()) {
    steps.emplace_back([variant](Engine& apart, int64_t step) {
      TrainStepRequest request = RequestOf(step);
      auto& batch = std::get<PolicyBatch>(request.batch);
      GiveCommonPrompts(batch);
      RecordLogProbs(apart, batch);
      variant(batch);
      return request;
    });
  }
  steps.emplace_back([](Engine&, int64_t step) {
    TrainStepRequest supervised = SupervisedOf(step);
    for (SupervisedSample& sample : std::get<SupervisedBatch>(supervised.batch).samples) {
      sample.prompt_token_ids = kCommonPrompt;
    }
    return supervised;
  });
  ExpectSharingChangesNothing(
      [this](EngineOptions& options) {
        options.reference_model = options.model;
        options.junior_model = options.teacher_model = folder_ / "junior";
      },
      steps);
}

TEST_P(TrainerRanksTest, SharedPrefixesChangeNoMixtureOfExperts) {
  WriteTinyModel(folder_ / "mixtral", /*seed=*/3,
                 {{"intermediate_size", 44}, {"num_hidden_layers", 3}}, "mixtral");
  const MakeRequest request_of = [](Engine&, int64_t step) {
    TrainStepRequest request = RequestOf(step);
    GiveCommonPrompts(std::get<PolicyBatch>(request.batch));
    return request;
  };
  ExpectSharingChangesNothing(
      [this](EngineOptions& options) {
        options.model = folder_ / "mixtral";
        options.router_losses = {.load_balancing = 0.3, .z = 0.02};
      },
      {request_of, request_of});
}

// Pairs of samples have an image in common.
TEST_P(TrainerRanksTest, SharedPrefixesHaveImages) {
  const nlohmann::json width = {{"intermediate_size", 44}};
  WriteTinyModel(folder_ / "vision", /*seed=*/3, width, "qwen2_vl");
  const VisionConfig vision = *TinyModel("qwen2_vl", width)->config().vision;
  const MakeRequest request_of = [&](Engine&, int64_t step) {
    TrainStepRequest request = RequestOf(step);
    AddImages(vision, request);
    std::get<PolicyBatch>(request.batch).objective.loss.kl_coefficient = 0.1;
    return request;
  };
  ExpectSharingChangesNothing(
      [this](EngineOptions& options) {
        options.model = options.reference_model = folder_ / "vision";
        options.micro_batch_tokens = 64;
      },
      {request_of, request_of});
}

// With losses of its routers, and in every other step with the experts that the samples recorded.
TEST_P(TrainerRanksTest, AMixtureOfExpertsLearnsAsInOneProcess) {
  expected_version_ = 5;
  for (const char* family : {"mixtral", "qwen3_moe"}) {
    WriteTinyModel(folder_ / family, /*seed=*/3,
                   {{"intermediate_size", 44}, {"num_hidden_layers", 3}}, family);
  }
  const auto change = [this](EngineOptions& options) {
    options.model = folder_ / "mixtral";
    options.reference_model = folder_ / "qwen3_moe";  // whose routers choose for themselves
    options.micro_batch_tokens = 12;
    options.router_losses = {.load_balancing = 0.3, .z = 0.02};
  };
  RunRanks(change, [&](Engine& engine, FakeCritic&) {
    EngineOptions options = Options();
    change(options);
    const auto single = Make(options);
    for (int64_t step = 1; step <= 4; ++step) {
      SCOPED_TRACE(absl::StrCat("step ", step));
      TrainStepRequest request = RequestOf(step);
      auto& batch = std::get<PolicyBatch>(request.batch);
      RecordLogProbs(*single, batch);
      batch.objective.loss.kl_coefficient = 0.1;
      if (step % 2 == 0) ReplayRouting(batch, /*layers=*/3, /*num_experts=*/5);
      if (step == 4) {
        batch.objective.updates = {.num_mini_batches = 2, .num_epochs = 2};
        batch.objective.old_logprobs = OldLogprobs::kRecomputed;
      }
      const StepResult ranked = Step(engine, request);
      ExpectSameReport(ranked, Step(*single, request));
      EXPECT_GT(ranked.report.metrics.at("router/aux_loss"), 1);
      EXPECT_GE(ranked.report.metrics.at("router/max_load_ratio"), 1);
    }
    const TrainStepRequest supervised = SupervisedOf(5);
    ExpectSameReport(Step(engine, supervised), Step(*single, supervised));
  });
}

TEST_P(TrainerRanksTest, ASpeculatorLearnsAsBesideOneProcess) {
  const TemporaryFolder shared;
  expected_version_ = 3;
  const auto change = [](EngineOptions& options) {
    options.micro_batch_tokens = 12;
    options.speculator = {.adapter = "mlp", .seed = 7, .n_predict = 2, .inner_dim = 16};
    options.speculator_optimizer = options.optimizer;
  };
  RunRanks(change, [&](Engine& engine, FakeCritic&) {
    EngineOptions options = Options();
    change(options);
    const auto single = Make(options);
    std::string saved;
    StepResult last;
    for (int64_t step = 1; step <= 3; ++step) {
      TrainStepRequest request = RequestOf(step);
      RecordLogProbs(*single, std::get<PolicyBatch>(request.batch));
      last = Step(engine, request);
      ExpectSameReport(last, Step(*single, request));
      EXPECT_GT(last.report.metrics.at("speculator/loss"), 0);
      const auto source = engine.Snapshot({}, {}).value();
      EXPECT_EQ(source->manifest().version, step);
      EXPECT_EQ(source->manifest().components.at(0).config,
                single->Snapshot({}, {}).value()->manifest().components.at(0).config);
      EXPECT_EQ(source->manifest().tensors, single->Snapshot({}, {}).value()->manifest().tensors);
      if (step == 2)
        saved =
            engine.SaveCheckpoint({}, {.directory = shared / "checkpoints", .name = "two"})->path;
    }
    // The checkpoint of any layout goes on under any other.
    const auto resumed = Make(options);
    ASSERT_TRUE(resumed->LoadCheckpoint({}, {saved}).ok());
    TrainStepRequest request = RequestOf(3);
    RecordLogProbs(*resumed, std::get<PolicyBatch>(request.batch));
    ExpectSameReport(last, Step(*resumed, request));
  });
}

TEST_P(TrainerRanksTest, ASpeculatorLearnsAloneAsOnOneProcess) {
  const TemporaryFolder shared;
  expected_version_ = 5;
  const auto change = [](EngineOptions& options) {
    options.micro_batch_tokens = 12;
    options.speculator = {.adapter = "mlp", .seed = 7, .n_predict = 2, .inner_dim = 16};
    options.speculator_optimizer = options.optimizer;
    options.freeze_base_model = true;
  };
  RunRanks(change, [&](Engine& engine, FakeCritic&) {
    EngineOptions options = Options();
    change(options);
    const auto single = Make(options);
    const std::string digest = Digest(*single);
    std::string saved;
    StepResult last;
    for (int64_t step = 1; step <= 5; ++step) {
      const TrainStepRequest request = SupervisedOf(step);
      last = Step(engine, request);
      ExpectSameReport(last, Step(*single, request));
      EXPECT_EQ(Digest(engine), digest);
      if (step == 4)
        saved =
            engine.SaveCheckpoint({}, {.directory = shared / "checkpoints", .name = "four"})->path;
    }
    EXPECT_GT(last.report.metrics.at("speculator/loss"), 0);
    const absl::Status refused = engine.TrainStep({}, Stamped(engine, RequestOf(6))).status();
    EXPECT_EQ(Reason(refused), "BASE_MODEL_FROZEN") << refused;
    const auto resumed = Make(options);
    ASSERT_TRUE(resumed->LoadCheckpoint({}, {saved}).ok());
    ExpectSameReport(last, Step(*resumed, SupervisedOf(5)));
    // The checkpoint of one process goes on under any layout.
    const auto of_single =
        resumed->SaveCheckpoint({}, {.directory = shared / "checkpoints", .name = "five"}).value();
    ASSERT_TRUE(engine.LoadCheckpoint({}, {of_single.path}).ok());
    EXPECT_EQ(engine.Info().optimizer_steps, 5);
    EXPECT_EQ(engine.Snapshot({}, {}).value()->manifest().digest, digest);
  });
}

TEST_P(TrainerRanksTest, OnlyRankZeroAsksTheCritic) {
  expected_version_ = 1;
  asks_critic_ = true;
  RunRanks([](EngineOptions&) {},
           [&](Engine& engine, FakeCritic& critic) {
             const auto single = Make(Options(), std::make_shared<FakeCritic>());
             TrainStepRequest request = RequestOf(1);
             auto& batch = std::get<PolicyBatch>(request.batch);
             batch.objective.advantage_estimator = AdvantageEstimator::kGae;
             critic.fail = absl::UnavailableError("the critic is away");
             const absl::Status away = engine.TrainStep({}, Stamped(engine, request)).status();
             EXPECT_EQ(away.code(), absl::StatusCode::kUnavailable) << away;
             critic.fail = absl::OkStatus();
             ExpectSameReport(Step(engine, request), Step(*single, request));
           });
}

TEST_P(TrainerRanksTest, WhatIsRefusedOrSkippedLeavesTheRanksInStep) {
  expected_version_ = 1;
  RunRanks([](EngineOptions&) {},
           [&](Engine& engine, FakeCritic&) {
             TrainStepRequest request = RequestOf(1);
             TrainStepRequest broken = request;
             std::get<PolicyBatch>(broken.batch).samples[2].reward.reset();
             EXPECT_EQ(FieldPath(engine.TrainStep({}, Stamped(engine, broken)).status()),
                       "samples[2].reward");
             TrainStepRequest masked = request;
             masked.request_id = masked.payload_digest = "masked";
             for (PolicySample& sample : std::get<PolicyBatch>(masked.batch).samples) {
               sample.trajectory.authorship_mask.assign(sample.trajectory.authorship_mask.size(),
                                                        Author::kJunior);
             }
             EXPECT_TRUE(Step(engine, masked).report.skipped);
             request.step = 2;
             EXPECT_EQ(Step(engine, request).report.weights.version, 1);
           });
}

TEST_P(TrainerRanksTest, CheckpointsGoOnUnderOtherLayouts) {
  const TemporaryFolder shared;
  expected_version_ = 3;
  RunRanks([](EngineOptions&) {},
           [&](Engine& engine, FakeCritic&) {
             Step(engine, RequestOf(1));
             const auto saved =
                 engine.SaveCheckpoint({}, {.directory = shared / "checkpoints", .name = "one"});
             ASSERT_TRUE(saved.ok()) << saved.status();
             const std::string digest = Digest(engine);
             const StepResult second = Step(engine, RequestOf(2));

             const auto single = Make(Options());
             ASSERT_TRUE(single->LoadCheckpoint({}, {saved->path}).ok());
             EXPECT_EQ(Digest(*single), digest);
             ExpectSameReport(second, Step(*single, RequestOf(2)));
             const auto of_single =
                 single->SaveCheckpoint({}, {.directory = shared / "checkpoints", .name = "two"})
                     .value();

             ASSERT_TRUE(engine.LoadCheckpoint({}, {of_single.path}).ok());
             EXPECT_EQ(Digest(engine), Digest(*single));
             ExpectSameReport(Step(engine, RequestOf(3)), Step(*single, RequestOf(3)));

             const auto weights = engine.Snapshot({}, {});
             ASSERT_TRUE(weights.ok()) << weights.status();
             EXPECT_EQ((*weights)->manifest().digest, Digest(engine));
             ASSERT_TRUE(engine.ExportModel({}, shared / "exported", DType::kFloat32).ok());
             EngineOptions exported = Options();
             exported.model = shared / "exported";
             EXPECT_EQ(Digest(*Make(exported)), Digest(engine));
           });
}

TEST_P(TrainerRanksTest, RanksThatDifferDoNotStart) {
  ranks::RunOnRanks(GetParam().ranks, [&](const RankEnvironment& environment) {
    EngineOptions options = Ranked(environment);
    options.configuration = environment.rank == 0 ? "seed: 1" : "seed: 2";
    const absl::Status configuration = CreateEngine(options, nullptr).status();
    EXPECT_EQ(configuration.message(),
              "rank 1 has another configuration: 'seed: 2', where rank 0 has 'seed: 1'");
  });
  ranks::RunOnRanks(GetParam().ranks, [&](const RankEnvironment& environment) {
    EngineOptions options = Ranked(environment);
    if (environment.rank == 1) {
      WriteTinyModel(folder_ / "other", /*seed=*/4,
                     {{"intermediate_size", 44}, {"vocab_size", 65}});
      options.model = folder_ / "other";
    }
    const absl::Status model = CreateEngine(options, nullptr).status();
    EXPECT_EQ(model.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_TRUE(absl::StartsWith(model.message(), "rank 1 has another model: ")) << model;
  });
  ranks::RunOnRanks(GetParam().ranks, [&](const RankEnvironment& environment) {
    EngineOptions options = Ranked(environment);
    options.speculator = {.adapter = "mlp", .seed = environment.rank == 1 ? 2u : 1u};
    options.speculator_optimizer = options.optimizer;
    const absl::Status speculator = CreateEngine(options, nullptr).status();
    EXPECT_EQ(speculator.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_TRUE(absl::StartsWith(speculator.message(), "rank 1 has another speculator: "))
        << speculator;
  });
  ranks::RunOnRanks(GetParam().ranks, [&](const RankEnvironment& environment) {
    EngineOptions options = Ranked(environment);
    if (environment.rank == 1) options.model = "/nowhere";
    const absl::Status missing = CreateEngine(options, nullptr).status();
    EXPECT_EQ(FieldPath(missing), "model");
    EXPECT_TRUE(absl::StrContains(missing.message(), "rank 1: ")) << missing;
  });
}

}  // namespace
}  // namespace tandem::trainer
