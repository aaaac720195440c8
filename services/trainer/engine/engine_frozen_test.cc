// A speculator that trains alone, on a model that is frozen.
#include <gmock/gmock.h>

#include <filesystem>

#include "common/base/errors/error.h"
#include "services/trainer/engine/testing/speculator_fixture.h"

namespace tandem::trainer {
namespace {

namespace fs = std::filesystem;
using ::testing::AnyOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

class EngineFrozenTest : public EngineSpeculatorTest {
 protected:
  EngineOptions Frozen(const std::string& adapter = "mlp") const {
    EngineOptions options = WithSpeculator(adapter);
    options.freeze_base_model = true;
    return options;
  }
  static std::string Weights(const fs::path& checkpoint) {
    return Bytes(checkpoint / "model.safetensors");
  }
};

TEST_F(EngineFrozenTest, TheModelKeepsItsBitsWhileTheSpeculatorLearns) {
  for (const char* adapter : {"mlp", "arctic_lstm"}) {
    const auto engine = Make(Frozen(adapter));
    const std::string digest = Digest(*engine);
    const std::string start = Save(*engine, absl::StrCat(adapter, "-start"));
    double first = 0, last = 0;
    for (int64_t step = 1; step <= 20; ++step) {
      const StepReport report = Step(*engine, Supervised(step)).report;
      EXPECT_EQ(report.weights.version, step);
      EXPECT_EQ(report.weights.digest, digest);
      last = report.metrics.at("speculator/loss");
      if (step == 1) first = last;
    }
    EXPECT_LT(last, 0.7 * first) << adapter;
    EXPECT_EQ(engine->Info().optimizer_steps, 20);
    EXPECT_EQ(engine->Info().model.num_trainable_parameters, 0);
    const std::string end = Save(*engine, absl::StrCat(adapter, "-end"));
    EXPECT_EQ(Weights(end), Weights(start));
    EXPECT_NE(State(end), State(start));
  }
}

// Its gradients are those of a step that trains the model too: the hidden states are the same.
TEST_F(EngineFrozenTest, AnUpdateHasTheBitsOfOneBesideTheModels) {
  for (const char* dtype : {"float32", "bfloat16"}) {
    EngineOptions options = WithSpeculator();
    options.compute.dtype = dtype;
    const auto beside = Make(options);
    options.freeze_base_model = true;
    const auto alone = Make(options);
    EXPECT_EQ(Digest(*alone), Digest(*beside));
    const auto of_both = Step(*beside, Supervised(1)).report.metrics;
    for (const auto& [name, value] : Step(*alone, Supervised(1)).report.metrics) {
      EXPECT_EQ(value, of_both.at(name)) << name;
    }
    EXPECT_EQ(State(Save(*alone, absl::StrCat(dtype, "-alone"))),
              State(Save(*beside, absl::StrCat(dtype, "-beside"))));
  }
}

TEST_F(EngineFrozenTest, NoMetricIsOfTheModel) {
  const auto engine = Make(Frozen());
  for (const auto& [name, value] : Step(*engine, Supervised(1)).report.metrics) {
    EXPECT_THAT(name, AnyOf(StartsWith("speculator/"), StartsWith("tokens/"),
                            ::testing::Eq("policy/micro_batches")));
  }
}

TEST_F(EngineFrozenTest, ACheckpointGoesOnBitForBitAndHasNoOptimizerOfTheModel) {
  const auto engine = Make(Frozen());
  for (int64_t step = 1; step <= 2; ++step) Step(*engine, Supervised(step));
  const fs::path saved = Save(*engine, "two");
  EXPECT_FALSE(fs::exists(saved / "optimizer.safetensors"));
  const StepResult third = Step(*engine, Supervised(3)), fourth = Step(*engine, Supervised(4));
  const std::string end = State(Save(*engine, "four"));

  EngineOptions other_seed = Frozen();
  other_seed.speculator.seed = 8;
  const auto resumed = Make(other_seed);
  ASSERT_TRUE(resumed->LoadCheckpoint({}, {saved}).ok());
  EXPECT_EQ(resumed->Info().optimizer_steps, 2);
  EXPECT_EQ(Step(*resumed, Supervised(3)).report, third.report);
  EXPECT_EQ(Step(*resumed, Supervised(4)).report, fourth.report);
  EXPECT_EQ(State(Save(*resumed, "resumed")), end);

  const std::string start = State(Save(*Make(Frozen()), "start"));
  ASSERT_TRUE(engine->LoadBaseModel({}).ok());
  EXPECT_EQ(State(Save(*engine, "restarted")), start);
  EXPECT_EQ(engine->Info().weights.version, 0);
}

TEST_F(EngineFrozenTest, ItLoadsCheckpointsOfATrainedModelAndNoOtherLoadsItsOwn) {
  const auto trained = Make(WithSpeculator()), frozen = Make(Frozen());
  Step(*trained, Supervised(1));
  const std::string of_trained = Save(*trained, "trained");
  ASSERT_TRUE(frozen->LoadCheckpoint({}, {of_trained}).ok());
  EXPECT_EQ(Digest(*frozen), Digest(*trained));
  Step(*frozen, Supervised(2));
  EXPECT_EQ(Digest(*frozen), Digest(*trained));

  const std::string before = State(Save(*trained, "before"));
  const std::string of_frozen = Save(*frozen, "frozen");
  const absl::Status refused = trained->LoadCheckpoint({}, {of_frozen});
  EXPECT_TRUE(absl::IsFailedPrecondition(refused)) << refused;
  EXPECT_EQ(FieldPath(refused), "path");
  EXPECT_THAT(std::string(refused.message()), HasSubstr("freeze_base_model"));
  EXPECT_EQ(State(Save(*trained, "after")), before);
}

TEST_F(EngineFrozenTest, APolicyStepIsRefused) {
  const auto engine = Make(Frozen());
  const absl::Status refused = engine->TrainStep({}, Policy(*engine, 1)).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(refused)) << refused;
  EXPECT_EQ(Reason(refused), "BASE_MODEL_FROZEN");
  EXPECT_EQ(FieldPath(refused), "policy");
  EXPECT_THAT(std::string(refused.message()), HasSubstr("speculator.freeze_base_model"));
  EXPECT_EQ(Step(*engine, Supervised(1)).report.weights.version, 1);
}

TEST_F(EngineFrozenTest, NumbersForTheModelsOptimizerAreRefused) {
  const auto engine = Make(Frozen("mlp"));
  TrainStepRequest request = Supervised(1);
  request.optimizer.learning_rate = 1e-3;
  EXPECT_EQ(FieldPath(engine->TrainStep({}, request).status()), "optimizer");
}

TEST_F(EngineFrozenTest, AStepThatTeachesNothingIsSkipped) {
  const auto engine = Make(Frozen());
  const std::string before = State(Save(*engine, "before"));
  TrainStepRequest request = Supervised(1);
  request.batch = SupervisedBatch{.objective = {}, .samples = {{{1}, {5, 6}}}};
  const StepReport report = Step(*engine, request).report;
  EXPECT_TRUE(report.skipped);
  EXPECT_THAT(report.skip_reason, HasSubstr("too short"));
  EXPECT_EQ(report.weights.version, 0);
  EXPECT_EQ(State(Save(*engine, "after")), before);
}

TEST_F(EngineFrozenTest, AnUpdateThatIsNotFiniteSkipsTheStep) {
  EngineOptions options = Frozen();
  StartFromOverflow(options);
  const auto engine = Make(options);
  const StepResult result = Step(*engine, Supervised(1));
  EXPECT_TRUE(result.report.skipped);
  EXPECT_TRUE(result.not_finite);
  EXPECT_EQ(result.report.weights.version, 0);
}

TEST_F(EngineFrozenTest, TheModelIsPublishedExportedAndAskedForLogProbs) {
  const auto engine = Make(Frozen()), without = Make(Without());
  Step(*engine, Supervised(1));
  const auto weights = engine->Snapshot({}, {});
  ASSERT_TRUE(weights.ok()) << weights.status();
  EXPECT_EQ((*weights)->manifest().version, 1);
  EXPECT_EQ((*weights)->manifest().digest, Digest(*without));
  ASSERT_TRUE(engine->ExportModel({}, folder_ / "exported", DType::kFloat32).ok());
  EXPECT_EQ(Bytes(fs::path(folder_ / "exported") / "model.safetensors"),
            Weights(Save(*without, "plain")));
  EXPECT_EQ(LogProbsOf(*engine, {1, 2}, {3, 4}), LogProbsOf(*without, {1, 2}, {3, 4}));
}

TEST_F(EngineFrozenTest, ErrorsNameTheSetting) {
  EngineOptions options = Frozen();
  options.freeze = {"*norm*"};
  EXPECT_EQ(FieldPath(CreateEngine(options, nullptr).status()), "freeze");
  options = Frozen();
  options.speculator = {};
  EXPECT_EQ(FieldPath(CreateEngine(options, nullptr).status()), "speculator.adapter");
}

}  // namespace
}  // namespace tandem::trainer
