// Checkpoints and exports of a model on several ranks. training_core_test has those of one process.
#include "services/training_core/training_checkpoint.h"

#include <ATen/ATen.h>
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <filesystem>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "common/base/errors/error.h"
#include "common/base/files/atomic_file.h"
#include "common/base/files/file_descriptor.h"
#include "common/base/files/paths/confined_folder.h"
#include "common/base/files/paths/path_roots.h"
#include "common/base/steady_time.h"
#include "common/model/testing/tiny_model_dir.h"
#include "common/parallel/megatron/megatron_options.h"
#include "common/parallel/megatron/megatron_strategy.h"
#include "common/parallel/single_strategy.h"
#include "common/parallel/testing/memory_meter.h"
#include "common/parallel/testing/strategy_runs.h"
#include "common/parallel/testing/zero_of_stage.h"
#include "common/parallel/zero/zero_strategy.h"
#include "common/ranks/testing/counted_communication.h"
#include "common/ranks/testing/rank_processes.h"
#include "common/tensor/aten/aten_bytes.h"
#include "common/tensor/aten/catch_torch_errors.h"
#include "common/tensor/safetensors/safetensors.h"

namespace tandem::training {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;
using Ranks = std::shared_ptr<ranks::Communicator>;

struct Layout {
  int ranks, stage;              // stage 0: single
  int tensor = 0, pipeline = 1;  // megatron, if `tensor` is set
};

std::unique_ptr<parallel::Strategy> MakeStrategy(const Layout& layout, const Ranks& ranks) {
  if (layout.tensor > 0) {
    return std::make_unique<parallel::MegatronStrategy>(
        parallel::MegatronOptions{.tensor_model_parallel_size = layout.tensor,
                                  .pipeline_model_parallel_size = layout.pipeline,
                                  .use_distributed_optimizer = true},
        ranks);
  }
  if (layout.stage == 0) return std::make_unique<parallel::SingleStrategy>();
  return std::make_unique<parallel::ZeroStrategy>(parallel::ZeroOfStage(layout.stage), ranks);
}

// Every matrix divides among the ranks of every layout here.
const nlohmann::json kSplittable = {{"num_hidden_layers", 4},
                                    {"hidden_size", 64},
                                    {"intermediate_size", 128},
                                    {"num_attention_heads", 4},
                                    {"num_key_value_heads", 2}};

absl::StatusOr<checkpoint::Saved> SaveVersion(parallel::Strategy& strategy,
                                              const ConfinedPath& parent, int64_t version,
                                              const std::string& name = "last") {
  const TrainingState state = {.kind = "trainer", .version = version};
  absl::StatusOr<StartedSave> save = StartSave(
      parent, name, /*keep=*/0, {.strategy = strategy, .state = state}, /*copies=*/nullptr);
  if (!save.ok()) return save.status();
  return std::move(*save).Finish(*strategy.ranks().patient());
}

// Loads as TrainingCore does.
absl::Status Load(parallel::Strategy& strategy, const std::string& path) {
  absl::StatusOr<TrainingCheckpoint> read = ReadTraining(path, strategy, "trainer");
  if (!read.ok()) return read.status();
  if (absl::Status loaded = strategy.LoadOptimizer(path); !loaded.ok()) return loaded;
  return strategy.LoadParameters(read->weights.tensors);
}

// Returns name, shape and bytes of all tensors of a model directory, whichever files they are in.
std::string WeightsOf(const std::string& path) {
  const auto files = SafetensorsDirectory::Open(path).value();
  std::string all;
  for (const TensorView& tensor : files->tensors()) {
    absl::StrAppend(&all, tensor.name, " [", absl::StrJoin(tensor.shape, ", "), "]",
                    absl::string_view(reinterpret_cast<const char*>(tensor.data), tensor.bytes));
  }
  return all;
}

int64_t Entries(const std::string& directory) {
  return std::distance(fs::directory_iterator(directory), {});
}

// Checkpoints of N ranks load on M ranks. The weights keep their bits, and the tensors equal those
// of a single process.
void ExpectAnyLayoutLoadsWhatAnyOtherSaved(const std::string& family,
                                           const std::vector<Layout>& layouts) {
  const TemporaryFolder folder;
  for (const Layout& saved : layouts) {
    const std::string parent = folder / absl::StrCat(saved.ranks, "-", saved.stage);
    ranks::RunConnected(saved.ranks, [&](const Ranks& ranks) {
      const TemporaryFolder own;
      WriteTinyModel(own / "model", 3, {}, family);
      const auto strategy = MakeStrategy(saved, ranks);
      parallel::Prepare(*strategy, own / "model");
      parallel::Steps(*strategy, 2);
      const auto written = SaveVersion(*strategy, parent, 2);
      ASSERT_TRUE(written.ok()) << written.status();
      EXPECT_EQ(written->path, parent + "/last");
      EXPECT_GT(written->bytes, 0);
      const NamedTensors whole = parallel::WholeParameters(*strategy);
      if (ranks->rank() != 0) return;
      EXPECT_TRUE(checkpoint::Verify(written->path).ok());
      const auto model = Model::Load(written->path).value();
      for (const auto& [name, tensor] : whole) EXPECT_TRUE(model->Parameter(name).equal(tensor));
    });
    for (const Layout& layout : layouts) {
      const std::string again = folder / "again";
      fs::remove_all(again);
      ranks::RunConnected(layout.ranks, [&](const Ranks& ranks) {
        const TemporaryFolder own;
        WriteTinyModel(own / "model", 4, {}, family);
        const auto strategy = MakeStrategy(layout, ranks);
        parallel::Prepare(*strategy, own / "model");
        const absl::Status loaded = Load(*strategy, parent + "/last");
        ASSERT_TRUE(loaded.ok()) << loaded;
        EXPECT_EQ(strategy->optimizer_steps(), 2);
        ASSERT_TRUE(SaveVersion(*strategy, again, 2).ok());
        EXPECT_TRUE(ExportModel(*strategy, again + "/export/", DType::kFloat32).ok());
      });
      for (const char* name : {"last", "export"}) {
        EXPECT_EQ(WeightsOf(again + "/" + name), WeightsOf(parent + "/last"))
            << saved.ranks << " to " << layout.ranks << ", " << name;
      }
    }
  }
}

// DeepSeek-V3's layers for multi-token prediction are in every copy and in no pass.
TEST(TrainingCheckpointTest, TensorsThatAreKeptDoNotMakeItAnotherModel) {
  const TemporaryFolder folder;
  const std::string model = folder / "model", kept = "model.layers.2.eh_proj.weight";
  WriteTinyModel(model, 3, {}, "deepseek_v3");
  NamedTensors tensors = Model::Load(model).value()->Parameters();
  tensors.emplace_back(kept, at::randn({30, 60}));
  ASSERT_TRUE(WriteNamedTensors(model + "/model.safetensors", tensors).ok());
  for (const Layout& layout : {Layout{1, 0}, Layout{2, 3}}) {
    const std::string parent = folder / absl::StrCat(layout.ranks);
    ranks::RunConnected(layout.ranks, [&](const Ranks& ranks) {
      const auto strategy = MakeStrategy(layout, ranks);
      parallel::Prepare(*strategy, model);
      parallel::Steps(*strategy, 1);
      ASSERT_TRUE(SaveVersion(*strategy, parent, 1).ok());
      const absl::Status loaded = Load(*strategy, parent + "/last");
      EXPECT_TRUE(loaded.ok()) << loaded;
      ASSERT_TRUE(SaveVersion(*strategy, parent, 1, "again").ok());
    });
    EXPECT_EQ(WeightsOf(parent + "/again"), WeightsOf(parent + "/last"));
    EXPECT_THAT(WeightsOf(parent + "/last"), HasSubstr(kept));
  }
}

// Returns names and digests of a checkpoint's files.
std::map<std::string, std::string> DigestsOf(const std::string& path) {
  std::map<std::string, std::string> digests;
  const checkpoint::Manifest manifest = checkpoint::ReadManifest(path).value();
  for (const auto& file : manifest.files) digests[file.name] = file.digest;
  return digests;
}

TEST(TrainingCheckpointTest, ACopyIsWrittenWhileTheModelTrainsOn) {
  for (const Layout& layout :
       {Layout{1, 0}, Layout{2, 1}, Layout{2, 3}, Layout{2, 0, 2}, Layout{4, 0, 2, 2}}) {
    SCOPED_TRACE(absl::StrCat(layout.ranks, " ranks, stage ", layout.stage));
    const TemporaryFolder folder;
    const std::string parent = folder / "saved";
    ranks::RunConnected(layout.ranks, [&](const Ranks& ranks) {
      const TemporaryFolder own;
      WriteTinyModel(own / "model", 3, kSplittable);
      const auto strategy = MakeStrategy(layout, ranks);
      parallel::Prepare(*strategy, own / "model");
      parallel::Steps(*strategy, 2);
      std::vector<int> everyone(static_cast<size_t>(layout.ranks));
      std::iota(everyone.begin(), everyone.end(), 0);
      const Ranks beside = ranks->Split("beside", {everyone});
      TensorCopies copies;
      const TrainingState state = {.kind = "trainer", .version = 2};
      const SaveSource source = {.strategy = *strategy, .state = state};
      // A save that is given up leaves its memory to the next one.
      ASSERT_TRUE(StartSave(parent, "given_up", /*keep=*/0, source, &copies).ok());
      parallel::Step(*strategy, 3, 1);
      ASSERT_TRUE(SaveVersion(*strategy, parent, 2, "in_step").ok());
      absl::StatusOr<StartedSave> started =
          StartSave(parent, "beside", /*keep=*/0, source, &copies);
      ASSERT_TRUE(started.ok()) << started.status();
      EXPECT_EQ(started->path(), parent + "/beside");
      absl::StatusOr<checkpoint::Saved> written;
      std::thread writer([&] { written = std::move(*started).Finish(*beside); });
      parallel::Step(*strategy, 3, 0);
      writer.join();
      ASSERT_TRUE(written.ok()) << written.status();
      ASSERT_TRUE(SaveVersion(*strategy, parent, 2, "later").ok());
    });
    EXPECT_TRUE(checkpoint::Verify(parent + "/beside").ok());
    EXPECT_EQ(DigestsOf(parent + "/beside"), DigestsOf(parent + "/in_step"));
    EXPECT_NE(DigestsOf(parent + "/beside"), DigestsOf(parent + "/later"));
  }
}

// A strategy that fails on one rank while it writes the optimizer's state.
class FailingStrategy final : public parallel::ZeroStrategy {
 public:
  FailingStrategy(const Ranks& ranks, int failing_rank)
      : ZeroStrategy(parallel::ZeroOfStage(3), ranks), fails_(ranks->rank() == failing_rank) {}

  absl::Status SaveOptimizer(const std::string& directory) override {
    absl::Status saved = ZeroStrategy::SaveOptimizer(directory);
    return std::exchange(fails_, false) ? absl::ResourceExhaustedError("the disk is full") : saved;
  }
  absl::StatusOr<parallel::OptimizerWriter> CopyOptimizer(TensorCopies& copies) override {
    const auto copied = ZeroStrategy::CopyOptimizer(copies);
    if (!copied.ok() || !std::exchange(fails_, false)) return copied;
    return [](const std::string&) { return absl::ResourceExhaustedError("the disk is full"); };
  }

 private:
  bool fails_;
};

TEST(TrainingCheckpointTest, AnyLayoutLoadsWhatAnyOtherSaved) {
  ExpectAnyLayoutLoadsWhatAnyOtherSaved("llama", {{1, 0}, {2, 1}, {2, 3}, {4, 2}, {4, 3}});
}

// Files of Phi-3 hold several parameters in one tensor.
TEST(TrainingCheckpointTest, AnyLayoutLoadsFusedTensorsThatAnyOtherSaved) {
  ExpectAnyLayoutLoadsWhatAnyOtherSaved("phi3", {{1, 0}, {2, 1}, {2, 3}});
}

// Layouts in which ranks hold different values, and those in which all hold the same ones.
const Layout kManyRanks[] = {{2, 1},    {2, 3},       {4, 2},       {4, 3},
                             {2, 0, 2}, {2, 0, 1, 2}, {4, 0, 2, 2}, {4, 0, 2}};

int64_t BytesOf(const std::string& path) { return static_cast<int64_t>(fs::file_size(path)); }

// No rank gathers the model, writes or reads back more than its share, or sends what it need not:
// each value travels at most once, to the rank that writes it.
TEST(TrainingCheckpointTest, ASaveIsTheWorkOfAllRanks) {
  for (const Layout& layout : kManyRanks) {
    SCOPED_TRACE(absl::StrCat(layout.ranks, " ranks, stage ", layout.stage, ", tensor ",
                              layout.tensor, ", pipeline ", layout.pipeline));
    const TemporaryFolder folder;
    ranks::RunConnected(layout.ranks, [&](const Ranks& ranks) {
      const TemporaryFolder own;
      WriteTinyModel(own / "model", 3, kSplittable);
      const auto strategy = MakeStrategy(layout, ranks);
      parallel::Prepare(*strategy, own / "model");
      parallel::Steps(*strategy, 1);
      int64_t all = 0, largest = 0;
      for (const Parameter& parameter : strategy->model().DeclaredParameters()) {
        all += 4 * parameter.spec.numel();
        largest = std::max(largest, 4 * parameter.spec.numel());
      }
      const int64_t share = all / layout.ranks + largest, slack = 100'000;
      ranks->patient();
      const FileTraffic before = TotalFileTraffic();
      const ranks::CommunicationVolume volume = ranks::Communicated(
          *ranks, [&] { ASSERT_TRUE(SaveVersion(*strategy, folder / "saved", 1).ok()); });
      const FileTraffic after = TotalFileTraffic();

      const std::string file =
          absl::StrFormat("%s/model-%05d-of-%05d.safetensors", folder / "saved/last",
                          ranks->rank() + 1, layout.ranks);
      EXPECT_LE(BytesOf(file), share + slack);
      // Weights and two moments. Stage 1 of data parallel ranks divides moments by block.
      EXPECT_LE(after.written - before.written, 3 * share + slack);
      EXPECT_LE(after.read - before.read, slack);
      EXPECT_LE(volume.receive.bytes, BytesOf(file));
      EXPECT_LE(volume.send.bytes, share);
      EXPECT_LE(volume.plain_data.bytes, slack);
      EXPECT_EQ(volume.all_gather.calls + volume.broadcast.calls + volume.all_reduce.calls +
                    volume.reduce_scatter.calls + volume.all_to_all.calls,
                0);
      if (layout.stage == 1 || layout.stage == 2) {
        EXPECT_EQ(volume.send.calls, 0);
      }
      ranks->Barrier();
      EXPECT_TRUE(checkpoint::Verify(folder / "saved/last").ok());
    });
  }
}

// A rank compares its share of the files with the manifest, and reads of the weights and moments
// what it holds, whoever wrote them.
TEST(TrainingCheckpointTest, ALoadReadsWhatTheRankHolds) {
  const TemporaryFolder folder;
  WriteTinyModel(folder / "model", 3, kSplittable);
  ranks::RunConnected(1, [&](const Ranks& ranks) {
    const auto strategy = MakeStrategy({1, 0}, ranks);
    parallel::Prepare(*strategy, folder / "model");
    parallel::Steps(*strategy, 1);
    ASSERT_TRUE(SaveVersion(*strategy, folder / "saved", 1).ok());
  });
  for (const Layout& layout : kManyRanks) {
    SCOPED_TRACE(absl::StrCat(layout.ranks, " ranks, stage ", layout.stage, ", tensor ",
                              layout.tensor, ", pipeline ", layout.pipeline));
    ranks::RunConnected(layout.ranks, [&](const Ranks& ranks) {
      const auto strategy = MakeStrategy(layout, ranks);
      parallel::Prepare(*strategy, folder / "model");
      int64_t held = 0, largest = 0, all = 0;
      for (const Parameter& parameter : strategy->model().DeclaredParameters()) {
        const at::Tensor values = strategy->HeldValues(parameter);
        if (values.defined()) held += 4 * values.numel();
        all += 4 * parameter.spec.numel();
        largest = std::max(largest, 4 * parameter.spec.numel());
      }
      if (layout.stage == 3) {
        EXPECT_LE(held, all / layout.ranks + 4096);
      }
      const std::string path = folder / "saved/last";
      int64_t verified = 0;  // at most; a file is one rank's
      for (const char* name : {"model.safetensors", "optimizer.safetensors"}) {
        verified = std::max(verified, BytesOf(path + "/" + name));
      }
      const FileTraffic before = TotalFileTraffic();
      const parallel::MemoryMeter meter;
      const absl::Status loaded = Load(*strategy, path);
      ASSERT_TRUE(loaded.ok()) << loaded;
      const FileTraffic after = TotalFileTraffic();
      // Weights are looked at, then copied; two moments are copied.
      const int64_t moments =
          layout.stage == 3 || layout.tensor > 0 ? 2 * held : 2 * all / layout.ranks;
      EXPECT_LE(after.read - before.read, verified + 2 * held + moments + 100'000);
      EXPECT_LE(meter.peak_bytes(), moments + 4 * largest + 100'000);
    });
  }
}

// Ranks wait for a disk that takes longer than they wait for each other in a step.
TEST(TrainingCheckpointTest, ADiskThatIsSlowerThanTheTimeLimitEndsNobody) {
  constexpr absl::Duration kLimit = absl::Seconds(5);
  const TemporaryFolder folder;
  ranks::RunOnRanks(2, [&](const RankEnvironment& environment) {
    const TemporaryFolder own;
    WriteTinyModel(own / "model", 3, kSplittable);
    const Ranks ranks = ranks::Communicator::Connect(environment, {.timeout = kLimit}).value();
    parallel::ZeroStrategy strategy(parallel::ZeroOfStage(3), ranks);
    parallel::Prepare(strategy, own / "model");
    parallel::Steps(strategy, 1);
    int64_t all = 0;
    for (const Parameter& parameter : strategy.model().DeclaredParameters()) {
      all += 4 * parameter.spec.numel();
    }
    ranks->patient();
    if (environment.rank == 1) {  // its share of weights and moments takes longer than the limit
      const double rate = 3 * static_cast<double>(all) / 2 / absl::ToDoubleSeconds(1.4 * kLimit);
      ::setenv("TANDEM_TEST_DISK_BYTES_PER_SECOND", absl::StrCat(rate).c_str(), 1);
    }
    const SteadyTime start = SteadyTime::Now();
    const auto saved = SaveVersion(strategy, folder / "saved", 1);
    ASSERT_TRUE(saved.ok()) << saved.status();
    EXPECT_GT(SteadyTime::Now() - start, kLimit) << "the disk was not slow";
    const absl::Status loaded = Load(strategy, folder / "saved/last");
    EXPECT_TRUE(loaded.ok()) << loaded;
    ranks->patient()->Barrier();
  });
}

// What takes a file's place in a checkpoint: a link, a pipe without a writer, a device that never
// ends. Each is refused at once, wherever it leads.
TEST(TrainingCheckpointTest, OnlyTheFilesOfACheckpointAreRead) {
  const TemporaryFolder folder;
  WriteTinyModel(folder / "model", 3);
  ranks::RunConnected(1, [&](const Ranks& ranks) {
    const auto strategy = MakeStrategy({1, 0}, ranks);
    parallel::Prepare(*strategy, folder / "model");
    ASSERT_TRUE(SaveVersion(*strategy, folder / "saved", 1).ok());
    const fs::path path = folder / "saved/last";
    for (const auto& entry :
         std::vector<fs::directory_entry>(fs::directory_iterator(path), fs::directory_iterator())) {
      const std::string name = entry.path().filename();
      fs::rename(entry.path(), folder / "elsewhere");
      const std::function<void()> replacements[] = {
          [&] { fs::create_symlink(folder / "elsewhere", entry.path()); },
          [&] { fs::create_symlink("/dev/zero", entry.path()); },
          [&] { ASSERT_EQ(::mkfifo(entry.path().c_str(), 0600), 0); },
          [&] { fs::create_directories(entry.path()); }, [] {}};
      for (const auto& replace : replacements) {
        replace();
        const absl::Status refused = ReadTraining(path.string(), *strategy, "trainer").status();
        EXPECT_EQ(refused.code(), absl::StatusCode::kDataLoss) << name << ": " << refused;
        EXPECT_THAT(std::string(refused.message()), HasSubstr(name));
        fs::remove(entry.path());
      }
      fs::rename(folder / "elsewhere", entry.path());
    }
    EXPECT_TRUE(ReadTraining(path.string(), *strategy, "trainer").ok());
  });
}

// Somebody who may write inside a root changes a folder of the path into a link, and back.
TEST(TrainingCheckpointTest, NothingIsWrittenOutsideOfARootThatIsRaced) {
  const TemporaryFolder folder;
  const std::string base = fs::canonical(folder.path());
  const std::string inside = base + "/allowed/a", link = base + "/allowed/link";
  fs::create_directories(inside);
  fs::create_directories(base + "/outside");
  fs::create_directory_symlink(base + "/outside", link);
  ranks::RunConnected(1, [&](const Ranks&) {
    WriteTinyModel(folder / "model", 3, {{"num_hidden_layers", 1}});
    parallel::SingleStrategy strategy;
    parallel::Prepare(strategy, folder / "model");
    std::atomic<bool> done = false;
    std::thread attacker([&] {
      while (!done) ::renameat2(AT_FDCWD, inside.c_str(), AT_FDCWD, link.c_str(), RENAME_EXCHANGE);
    });
    const PathRoots roots({base + "/allowed"});
    int exported = 0, saved = 0;
    for (int i = 0; i < 60 || exported == 0 || saved == 0; ++i) {
      const auto path = roots.Confine("path", absl::StrCat(inside, "/", i, "/model"));
      if (path.ok()) exported += ExportModel(strategy, *path, DType::kFloat32).ok() ? 1 : 0;
      const auto directory = roots.Confine("directory", inside);
      if (!directory.ok()) continue;
      saved += SaveVersion(strategy, *directory, 0).ok() ? 1 : 0;
    }
    done = true;
    attacker.join();
  });
  EXPECT_TRUE(fs::is_empty(base + "/outside"));
}

TEST(TrainingCheckpointTest, AFailureOfAnyRankLeavesTheOldCheckpoint) {
  for (const auto& [failing, copied] :
       {std::pair{0, false}, std::pair{1, false}, std::pair{0, true}, std::pair{1, true}}) {
    const TemporaryFolder folder;
    ranks::RunConnected(2, [&](const Ranks& ranks) {
      const TemporaryFolder own;
      WriteTinyModel(own / "model", 3);
      parallel::ZeroStrategy good(parallel::ZeroOfStage(2), ranks);
      parallel::Prepare(good, own / "model");
      ASSERT_TRUE(SaveVersion(good, folder / "saved", 1).ok());
      const std::string old = WeightsOf(folder / "saved/last");

      FailingStrategy strategy(ranks, failing);
      parallel::Prepare(strategy, own / "model");
      parallel::Step(strategy, 3, 0);
      const TrainingState state = {.kind = "trainer", .version = 2};
      TensorCopies copies;
      absl::StatusOr<StartedSave> started =
          StartSave(folder / "saved", "last", /*keep=*/0, {.strategy = strategy, .state = state},
                    copied ? &copies : nullptr);
      ASSERT_TRUE(started.ok()) << started.status();
      EXPECT_EQ(std::move(*started).Finish(*ranks).status(),
                absl::ResourceExhaustedError("the disk is full"));
      ranks->Barrier();
      EXPECT_EQ(Entries(folder / "saved"), 1);
      EXPECT_EQ(WeightsOf(folder / "saved/last"), old);
      ranks->Barrier();
      ASSERT_TRUE(SaveVersion(strategy, folder / "saved", 2).ok());
      EXPECT_NE(WeightsOf(folder / "saved/last"), old);
    });
  }
}

// Every rank returns errors that rank 0 alone sees, with their field.
TEST(TrainingCheckpointTest, ErrorsOfTheDirectoryAreThoseOfAllRanks) {
  const TemporaryFolder folder;
  ASSERT_TRUE(WriteFileDurably(folder / "file", "x").ok());
  ranks::RunConnected(2, [&](const Ranks& ranks) {
    const TemporaryFolder own;
    WriteTinyModel(own / "model", 3);
    parallel::ZeroStrategy strategy(parallel::ZeroOfStage(3), ranks);
    parallel::Prepare(strategy, own / "model");
    EXPECT_EQ(FieldPath(SaveVersion(strategy, folder / "file", 1).status()), "directory");
    EXPECT_EQ(FieldPath(SaveVersion(strategy, folder / "saved", 1, "a/b").status()), "name");
    EXPECT_EQ(FieldPath(ExportModel(strategy, folder / "file/model", DType::kFloat32)), "path");
    const absl::Status exists = ExportModel(strategy, folder / "file", DType::kFloat32);
    EXPECT_EQ(exists.code(), absl::StatusCode::kAlreadyExists);
    EXPECT_EQ(FieldPath(exists), "path");
    EXPECT_EQ(ReadTraining(folder / "none", strategy, "trainer").status().code(),
              absl::StatusCode::kNotFound);

    ASSERT_TRUE(SaveVersion(strategy, folder / "saved", 1).ok());
    EXPECT_TRUE(ReadTraining(folder / "saved/last", strategy, "trainer").ok());
    EXPECT_EQ(ReadTraining(folder / "saved/last", strategy, "critic").status().code(),
              absl::StatusCode::kFailedPrecondition);
    WriteTinyModel(own / "other", 3, {{"intermediate_size", 44}});
    parallel::ZeroStrategy other(parallel::ZeroOfStage(3), ranks);
    parallel::Prepare(other, own / "other");
    const absl::Status refused = ReadTraining(folder / "saved/last", other, "trainer").status();
    EXPECT_EQ(FieldPath(refused), "path");
    EXPECT_THAT(std::string(refused.message()), HasSubstr("mlp.gate_proj.weight"));
  });
}

// A strategy that kills its process at one point of a save: before ranks agree, before or after
// another collective step, or at a tensor.
class DyingStrategy final : public parallel::ZeroStrategy {
 public:
  // Passes `points` points and is killed at the next one; negative: never.
  DyingStrategy(const Ranks& ranks, int stage, int points)
      : ZeroStrategy(parallel::ZeroOfStage(stage), ranks), points_(points) {}

  ranks::Communicator& ranks() override {
    Point();
    return ZeroStrategy::ranks();
  }
  at::Tensor HeldValues(const Parameter& parameter) const override {
    Point();
    return ZeroStrategy::HeldValues(parameter);
  }
  absl::Status SaveOptimizer(const std::string& directory) override {
    return Between([&] { return ZeroStrategy::SaveOptimizer(directory); });
  }

 private:
  template <typename Body>
  std::invoke_result_t<Body&> Between(Body&& body) {
    Point();
    auto result = body();
    Point();
    return result;
  }
  void Point() const {
    if (points_-- == 0) raise(SIGKILL);
  }

  mutable int points_;
};

class KilledSaveTest : public ::testing::TestWithParam<int> {  // the rank that is killed
 protected:
  static constexpr int kRanks = 2;

  // Saves the model of `seed`, as version `seed`, on ranks of which one may be killed. Returns how
  // that rank ended.
  std::string SaveOnRanks(uint64_t seed, int points,
                          std::optional<absl::Duration> kill_after = {}) {
    int begun[2];
    EXPECT_EQ(pipe(begun), 0);
    ranks::RankProcesses processes(kRanks, [&](const RankEnvironment& environment) {
      const std::string model = folder_ / absl::StrCat("model", environment.rank);
      WriteTinyModel(model, seed, {{"num_hidden_layers", 1}});
      const Ranks ranks =
          ranks::Communicator::Connect(environment, {.timeout = absl::Seconds(30)}).value();
      ranks->patient();  // as a server does, while all ranks are here
      DyingStrategy strategy(ranks, 3, environment.rank == GetParam() ? points : -1);
      parallel::Prepare(strategy, model);
      ranks->Barrier();
      if (environment.rank == GetParam()) {
        EXPECT_EQ(write(begun[1], "x", 1), 1);
      }
      const auto saved = SaveVersion(strategy, folder_ / "saved", static_cast<int64_t>(seed));
      const auto leave = [&] {
        ranks->Barrier();
        return absl::OkStatus();
      };
      if (saved.ok()) CatchTorchErrors("the other is gone", leave).IgnoreError();
    });
    if (kill_after.has_value()) {
      char byte = 0;
      EXPECT_EQ(read(begun[0], &byte, 1), 1);
      absl::SleepFor(*kill_after);
      processes.Signal(GetParam(), SIGKILL);
    }
    std::string how = processes.Wait(GetParam());
    // A server's monitor ends the ranks that are left, which wait without a time limit.
    std::string how_other;
    const int other = 1 - GetParam();
    for (int i = 0; i < 100 && !how.empty() && !processes.Ended(other, &how_other); ++i) {
      absl::SleepFor(absl::Milliseconds(20));
    }
    if (!how.empty()) processes.Signal(other, SIGKILL);
    processes.Wait(other);
    close(begun[0]);
    close(begun[1]);
    return how;
  }

  void PutBackTheOldOne() {
    fs::remove_all(folder_ / "saved");
    fs::copy(folder_ / "old", folder_ / "saved", fs::copy_options::recursive);
  }

  // All files of the checkpoint are of one version.
  void ExpectOldOrNew() {
    const std::string path = folder_ / "saved/last";
    const absl::Status whole = checkpoint::Verify(path);
    ASSERT_TRUE(whole.ok()) << whole;
    const auto listed = checkpoint::List(folder_ / "saved");
    ASSERT_EQ(listed.size(), 1u);
    const bool is_new = listed[0].identity.step == 4;
    EXPECT_EQ(listed[0].identity.step, is_new ? 4 : 3);
    EXPECT_EQ(WeightsOf(path), is_new ? new_ : old_);
    seen_new_ |= is_new;
    seen_old_ |= !is_new;
  }

  void SetUp() override {
    for (const auto& [seed, weights] : {std::pair{4, &new_}, std::pair{3, &old_}}) {
      fs::remove_all(folder_ / "saved");
      ASSERT_EQ(SaveOnRanks(static_cast<uint64_t>(seed), -1), "");
      *weights = WeightsOf(folder_ / "saved/last");
    }
    fs::copy(folder_ / "saved", folder_ / "old", fs::copy_options::recursive);
  }

  TemporaryFolder folder_;
  std::string old_, new_;  // the weights of versions 3 and 4
  bool seen_old_ = false, seen_new_ = false;
};

TEST_P(KilledSaveTest, AtAnyPointTheOldOrTheNewCheckpointIsThere) {
  for (int point = 0;; ++point) {
    SCOPED_TRACE(absl::StrCat("point ", point));
    PutBackTheOldOne();
    const std::string how = SaveOnRanks(4, point);
    ExpectOldOrNew();
    if (how.empty()) break;  // the save has no further point
    ASSERT_EQ(how, "signal 9");
    ASSERT_LT(point, 100);
  }
  EXPECT_TRUE(seen_old_);
  EXPECT_TRUE(seen_new_);
  // The next save removes the leftovers of killed ranks.
  EXPECT_EQ(SaveOnRanks(4, -1), "");
  EXPECT_EQ(Entries(folder_ / "saved"), 1);
}

TEST_P(KilledSaveTest, AtAnyMomentTheOldOrTheNewCheckpointIsThere) {
  for (int moment = 0; moment < 12; ++moment) {
    SCOPED_TRACE(absl::StrCat("moment ", moment));
    PutBackTheOldOne();
    SaveOnRanks(4, -1, moment * absl::Milliseconds(2));
    ExpectOldOrNew();
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, KilledSaveTest, ::testing::Range(0, 2));

}  // namespace
}  // namespace tandem::training
