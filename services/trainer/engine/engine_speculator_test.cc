// A speculator that trains beside the model.
#include <gmock/gmock.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include "common/base/errors/error.h"
#include "common/base/errors/status_macros.h"
#include "common/speculator/speculator_files.h"
#include "common/speculator/speculator_update.h"
#include "common/tensor/safetensors/safetensors.h"
#include "services/trainer/engine/auxiliary/speculator_trainer.h"
#include "services/trainer/engine/testing/speculator_fixture.h"

namespace tandem::trainer {
namespace {

namespace fs = std::filesystem;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::Key;
using ::testing::Not;
using ::testing::StartsWith;

TEST_F(EngineSpeculatorTest, ItLearnsBesideSupervisedSteps) {
  for (const char* adapter : {"mlp", "arctic_lstm"}) {
    const auto engine = Make(WithSpeculator(adapter));
    std::map<std::string, double> first, last;
    for (int64_t step = 1; step <= 30; ++step) {
      last = Step(*engine, Supervised(step)).report.metrics;
      if (step == 1) first = last;
    }
    EXPECT_LT(last.at("speculator/loss"), 0.6 * first.at("speculator/loss")) << adapter;
    EXPECT_GT(last.at("speculator/head_0_accuracy"), first.at("speculator/head_0_accuracy"));
    EXPECT_GT(last.at("speculator/head_1_accuracy"), 0.3);
    EXPECT_GT(first.at("speculator/grad_norm"), 0);
    EXPECT_EQ(first.at("speculator/learning_rate"), 2e-2);
    EXPECT_EQ(first.at("speculator/updates_not_finite"), 0);
    EXPECT_THAT(first, Not(Contains(Key("speculator/head_2_accuracy"))));
  }
}

TEST_F(EngineSpeculatorTest, ItLearnsFromHiddenStatesInBfloat16) {
  EngineOptions options = WithSpeculator();
  options.compute.dtype = "bfloat16";
  const auto engine = Make(options);
  const double first = Step(*engine, Supervised(1)).report.metrics.at("speculator/loss");
  double last = first;
  for (int64_t step = 2; step <= 15; ++step) {
    last = Step(*engine, Supervised(step)).report.metrics.at("speculator/loss");
  }
  EXPECT_LT(last, 0.8 * first);
}

TEST_F(EngineSpeculatorTest, TheModelHasTheBitsThatItHasWithoutOne) {
  const auto with = Make(WithSpeculator()), without = Make(Without());
  EXPECT_EQ(Digest(*with), Digest(*without));
  for (int64_t step = 1; step <= 4; ++step) {
    TrainStepRequest request = step % 2 == 0 ? Supervised(step) : Policy(*without, step);
    if (step == 3) std::get<PolicyBatch>(request.batch).objective.updates = {2, 2};
    const auto learnt = Step(*with, request).report.metrics;
    for (const auto& [name, value] : Step(*without, request).report.metrics) {
      EXPECT_THAT(name, Not(StartsWith("speculator/")));
      EXPECT_EQ(learnt.at(name), value) << name;
    }
    EXPECT_THAT(learnt, Contains(Key("speculator/loss")));
    EXPECT_EQ(Digest(*with), Digest(*without));
  }
  ASSERT_TRUE(with->ExportModel({}, folder_ / "exported", DType::kFloat32).ok());
  EXPECT_FALSE(fs::exists(fs::path(folder_ / "exported") / "speculator"));
}

// The tensors of a snapshot, as the bytes that are sent.
std::map<std::string, std::string> TensorsOf(const WeightSource& source) {
  std::map<std::string, std::string> tensors;
  int64_t offset = 0;
  for (const WeightSpec& spec : source.manifest().tensors) {
    std::vector<std::byte> bytes(spec.bytes());
    EXPECT_TRUE(source.Read(offset, absl::MakeSpan(bytes)).ok());
    offset += spec.bytes();
    tensors[spec.name].assign(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  }
  EXPECT_EQ(offset, source.manifest().total_bytes);
  return tensors;
}

TEST_F(EngineSpeculatorTest, ASnapshotHasTheModelAsWithoutOneAndTheSpeculatorBehindIt) {
  const auto with = Make(WithSpeculator()), without = Make(Without());
  std::vector<ComponentManifest> before;
  for (int64_t step = 1; step <= 2; ++step) {
    Step(*with, Supervised(step));
    Step(*without, Supervised(step));
    const auto source = with->Snapshot({}, {}).value(), alone = without->Snapshot({}, {}).value();
    EXPECT_EQ(source->manifest().version, step);
    EXPECT_EQ(source->manifest().Without(kSpeculatorComponent), alone->manifest());
    EXPECT_THAT(alone->manifest().components, IsEmpty());
    EXPECT_NE(source->manifest().components, before) << "the speculator has learnt";
    before = source->manifest().components;

    const auto saved = fs::path(Save(*with, absl::StrCat("step-", step))) / "speculator";
    const auto speculator = speculator::LoadSpeculator(saved, {}).value();
    EXPECT_THAT(source->manifest().components, ElementsAre(speculator::ManifestOf(*speculator)));
    auto tensors = TensorsOf(*source);
    for (const auto& [name, value] : speculator::WeightsToSend(*speculator)) {
      const std::string bytes(static_cast<const char*>(value.const_data_ptr()), value.nbytes());
      EXPECT_EQ(tensors.at(name), bytes) << name;
      tensors.erase(name);
    }
    EXPECT_EQ(tensors, TensorsOf(*alone));
    EXPECT_EQ(with->Snapshot({}, {}).value(), source) << "while it is held, it is used again";
  }
}

// The loss is a mean over all targets, however the batch is cut.
TEST_F(EngineSpeculatorTest, MicroBatchesAddUp) {
  EngineOptions whole = WithSpeculator();
  whole.micro_batch_tokens = 1000;
  const auto many = Make(WithSpeculator()), one = Make(whole);
  for (int64_t step = 1; step <= 3; ++step) {
    const auto a = Step(*many, Supervised(step)).report.metrics;
    const auto b = Step(*one, Supervised(step)).report.metrics;
    EXPECT_GT(a.at("policy/micro_batches"), b.at("policy/micro_batches"));
    for (const char* name : {"speculator/loss", "speculator/grad_norm"}) {
      EXPECT_NEAR(a.at(name), b.at(name), 1e-5 * b.at(name)) << name;
    }
  }
}

TEST_F(EngineSpeculatorTest, ARepeatedStepIsNotLearntTwice) {
  const auto engine = Make(WithSpeculator());
  const StepResult first = Step(*engine, Supervised(1));
  const std::string before = State(Save(*engine, "before"));
  const StepResult again = Step(*engine, Supervised(1));
  EXPECT_TRUE(again.replayed);
  EXPECT_EQ(again.report, first.report);
  EXPECT_EQ(State(Save(*engine, "after")), before);
}

// The step's own gradient is not finite: neither the model nor the speculator learns it.
TEST_F(EngineSpeculatorTest, AStepThatIsLeftOutIsNotLearnt) {
  const auto engine = Make(WithSpeculator());
  const std::string before = State(Save(*engine, "before"));
  TrainStepRequest request = Policy(*engine, 1);
  auto& batch = std::get<PolicyBatch>(request.batch);
  batch.objective.advantage_estimator = AdvantageEstimator::kProvided;
  for (PolicySample& sample : batch.samples) {
    sample.advantages.assign(sample.trajectory.response_token_ids.size(), 3e38f);
  }
  EXPECT_TRUE(Step(*engine, request).report.skipped);
  EXPECT_EQ(State(Save(*engine, "after")), before);
}

// A speculator whose numbers overflow leaves out its own update alone.
TEST_F(EngineSpeculatorTest, ASpeculatorThatIsNotFiniteLeavesTheModelsStepAlone) {
  EngineOptions options = WithSpeculator();
  StartFromOverflow(options);
  const auto engine = Make(options), without = Make(Without());
  const StepResult result = Step(*engine, Supervised(1));
  Step(*without, Supervised(1));
  EXPECT_FALSE(result.report.skipped);
  EXPECT_EQ(Digest(*engine), Digest(*without));
  EXPECT_EQ(result.report.metrics.at("speculator/updates_not_finite"), 1);
  EXPECT_THAT(result.report.metrics, Not(Contains(Key("speculator/loss"))));
}

TEST_F(EngineSpeculatorTest, UpdatesThatAreNotFiniteAreCountedOverTheStep) {
  EngineOptions options = WithSpeculator();
  StartFromOverflow(options);
  const auto engine = Make(options);
  TrainStepRequest request = Policy(*engine, 1);
  std::get<PolicyBatch>(request.batch).objective.updates = {2, 2};
  const auto metrics = Step(*engine, request).report.metrics;
  EXPECT_EQ(metrics.at("policy/updates"), 4);
  EXPECT_EQ(metrics.at("speculator/updates_not_finite"), 4);
}

TEST_F(EngineSpeculatorTest, FilesThatHaveChangedSinceTheStartAreRefused) {
  EngineOptions options = WithSpeculator();
  const fs::path own = folder_ / "own";
  fs::copy(fs::path(Save(*Make(options), "start")) / "speculator", own);
  options.speculator = {.adapter = "mlp", .path = own};
  const auto engine = Make(options);
  Step(*engine, Supervised(1));
  const std::string before = State(Save(*engine, "before"));
  auto loaded = speculator::LoadSpeculator(own, {}).value();
  at::Tensor(loaded->buffer()).mul_(2);
  fs::remove_all(own);
  ASSERT_TRUE(speculator::SaveSpeculator(*loaded, own).ok());
  const absl::Status refused = engine->LoadBaseModel({});
  EXPECT_TRUE(absl::IsFailedPrecondition(refused)) << refused;
  EXPECT_EQ(FieldPath(refused), "speculator.path");
  EXPECT_EQ(State(Save(*engine, "after")), before);
}

// No sequence is long enough for a row of two heads.
TEST_F(EngineSpeculatorTest, WithoutATargetThereIsNoUpdate) {
  const auto engine = Make(WithSpeculator());
  const std::string before = State(Save(*engine, "before"));
  TrainStepRequest request = Supervised(1);
  request.batch = SupervisedBatch{.objective = {}, .samples = {{{1}, {5, 6}}}};
  const StepResult result = Step(*engine, request);
  EXPECT_EQ(result.report.weights.version, 1);
  EXPECT_THAT(result.report.metrics, Not(Contains(Key("speculator/loss"))));
  EXPECT_EQ(State(Save(*engine, "after")), before);
}

TEST_F(EngineSpeculatorTest, ACheckpointContinuesBitForBit) {
  const auto engine = Make(WithSpeculator());
  Step(*engine, Supervised(1));
  Step(*engine, Supervised(2));
  const std::string saved = Save(*engine, "two");
  const auto alone = speculator::LoadSpeculator(fs::path(saved) / "speculator", {});
  ASSERT_TRUE(alone.ok()) << alone.status();
  const StepResult third = Step(*engine, Supervised(3)), fourth = Step(*engine, Supervised(4));
  const std::string end = State(Save(*engine, "four"));

  EngineOptions other_seed = WithSpeculator();
  other_seed.speculator.seed = 8;
  const auto resumed = Make(other_seed);
  ASSERT_TRUE(resumed->LoadCheckpoint({}, {saved}).ok());
  EXPECT_EQ(Step(*resumed, Supervised(3)).report, third.report);
  EXPECT_EQ(Step(*resumed, Supervised(4)).report, fourth.report);
  EXPECT_EQ(State(Save(*resumed, "resumed")), end);

  // A new run takes the weights, and begins its schedule and moments.
  EXPECT_EQ(resumed->Info().companion_updates, 4);
  ASSERT_TRUE(
      resumed->LoadCheckpoint({}, {.path = saved, .optimizer = training::OptimizerState::kFresh})
          .ok());
  EXPECT_EQ(resumed->Info().companion_updates, 0);
  EXPECT_EQ(Bytes(fs::path(Save(*resumed, "fresh")) / "speculator" / "model.safetensors"),
            Bytes(fs::path(saved) / "speculator" / "model.safetensors"));

  // The base model's files bring back the speculator of the start.
  const std::string start = State(Save(*Make(WithSpeculator()), "start"));
  ASSERT_TRUE(engine->LoadBaseModel({}).ok());
  EXPECT_EQ(State(Save(*engine, "restarted")), start);
}

TEST_F(EngineSpeculatorTest, CheckpointsWithAndWithoutOneAreLoaded) {
  const auto without = Make(Without()), with = Make(WithSpeculator());
  Step(*without, Supervised(1));
  const std::string plain = Save(*without, "plain");
  EXPECT_FALSE(fs::exists(fs::path(plain) / "speculator"));
  Step(*with, Supervised(1));
  const fs::path own = Save(*with, "own");
  ASSERT_TRUE(with->LoadCheckpoint({}, {plain}).ok());
  const fs::path kept = Save(*with, "kept");
  EXPECT_EQ(Bytes(kept / "speculator" / "model.safetensors"),
            Bytes(own / "speculator" / "model.safetensors"));
  EXPECT_NE(State(kept), State(own));  // the moments begin again
  ASSERT_TRUE(without->LoadCheckpoint({}, {own}).ok());
  EXPECT_EQ(Digest(*without), Digest(*with));
}

// The weights that an update which broke off has left are not kept.
TEST_F(EngineSpeculatorTest, WithoutOneInTheCheckpointHalfAnUpdateGivesWayToTheStart) {
  const std::string plain = Save(*Make(Without()), "plain");
  const auto learnt = Make(WithSpeculator());
  const fs::path start = Save(*learnt, "start");
  Step(*learnt, Supervised(1));
  const fs::path own = Save(*learnt, "own");

  const EngineOptions options = WithSpeculator();
  const auto core = training::TrainingCore::Create("trainer", "policy/", options,
                                                   {.head = HeadKind::kLm, .requires_grad = true})
                        .value();
  std::unique_ptr<SpeculatorTrainer> trainer;
  const auto load = [&](const std::string& directory, bool intact) {
    const absl::Status loaded = core->OnAllRanks("load", [&]() -> absl::Status {
      if (trainer == nullptr) trainer = SpeculatorTrainer::Create(options, *core).value();
      TANDEM_RETURN_IF_ERROR(trainer->ReadCheckpoint({directory}, intact));
      trainer->Adopt();
      const fs::path written = folder_ / "written";
      fs::create_directories(written);
      return trainer->Save(written);
    });
    EXPECT_TRUE(loaded.ok()) << loaded;
    return Bytes(fs::path(folder_ / "written") / "speculator" / "model.safetensors");
  };
  const auto weights = [](const fs::path& checkpoint) {
    return Bytes(checkpoint / "speculator" / "model.safetensors");
  };
  EXPECT_EQ(load(own, true), weights(own));
  EXPECT_EQ(load(plain, true), weights(own));
  EXPECT_EQ(load(plain, false), weights(start));
  EXPECT_EQ(load(own, false), weights(own));
}

TEST_F(EngineSpeculatorTest, AnotherSpeculatorsCheckpointIsRefusedAndChangesNothing) {
  const auto engine = Make(WithSpeculator());
  Step(*engine, Supervised(1));
  const std::string before = State(Save(*engine, "before"));
  const std::string digest = Digest(*engine);
  EngineOptions options = WithSpeculator();
  options.speculator.inner_dim = 8;
  const std::string narrow = Save(*Make(options), "narrow");
  const absl::Status refused = engine->LoadCheckpoint({}, {narrow});
  EXPECT_EQ(FieldPath(refused), "path") << refused;
  EXPECT_THAT(std::string(refused.message()), ::testing::HasSubstr("tensor '"));
  // Every byte counts in the manifest, also those in the folder.
  const std::string damaged = Save(*Make(WithSpeculator()), "damaged");
  std::ofstream(fs::path(damaged) / "speculator" / "config.json", std::ios::app) << " ";
  const absl::Status altered = engine->LoadCheckpoint({}, {damaged});
  EXPECT_TRUE(absl::IsDataLoss(altered)) << altered;
  EXPECT_THAT(std::string(altered.message()), ::testing::HasSubstr("speculator/config.json"));
  EXPECT_EQ(Digest(*engine), digest);
  EXPECT_EQ(State(Save(*engine, "after")), before);
}

TEST_F(EngineSpeculatorTest, ErrorsNameTheSetting) {
  EngineOptions options = WithSpeculator("medusa");
  EXPECT_EQ(FieldPath(CreateEngine(options, nullptr).status()), "speculator.adapter");
  options = WithSpeculator();
  options.speculator.method = "sum_lstm";
  EXPECT_EQ(FieldPath(CreateEngine(options, nullptr).status()), "speculator.method");
  options.speculator = {.adapter = "mlp", .path = "/nowhere"};
  EXPECT_EQ(FieldPath(CreateEngine(options, nullptr).status()), "speculator.path");
}

}  // namespace
}  // namespace tandem::trainer
