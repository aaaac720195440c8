// For tests: a trainer of a tiny model with a speculator.
#ifndef TANDEM_SERVICES_TRAINER_ENGINE_TESTING_SPECULATOR_FIXTURE_H_
#define TANDEM_SERVICES_TRAINER_ENGINE_TESTING_SPECULATOR_FIXTURE_H_

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/speculator/speculator_files.h"
#include "services/trainer/engine/testing/engine_fixture.h"

namespace tandem::trainer {

class EngineSpeculatorTest : public TrainerEngineTest {
 protected:
  EngineOptions WithSpeculator(const std::string& adapter = "mlp") const {
    EngineOptions options = Options();
    options.micro_batch_tokens = 12;
    options.speculator = {.adapter = adapter, .seed = 7, .n_predict = 2, .inner_dim = 16};
    options.speculator_optimizer = options.optimizer;
    options.speculator_optimizer.learning_rate = 2e-2;
    return options;
  }
  EngineOptions Without() const {
    EngineOptions options = Options();
    options.micro_batch_tokens = 12;
    return options;
  }
  static TrainStepRequest Supervised(int64_t step) {
    TrainStepRequest request = TestRequest();
    SupervisedBatch batch;
    for (const PolicySample& sample : TestBatch().samples) {
      batch.samples.push_back(
          {sample.trajectory.prompt_token_ids, sample.trajectory.response_token_ids});
    }
    request.batch = batch;
    return Numbered(std::move(request), step);
  }
  static TrainStepRequest Policy(Engine& engine, int64_t step) {
    PolicyBatch batch = TestBatch();
    RecordLogProbs(engine, batch);
    return Numbered(TestRequest(batch), step);
  }
  static TrainStepRequest Numbered(TrainStepRequest request, int64_t step) {
    request.step = step;
    request.request_id = request.payload_digest = absl::StrCat(step);
    request.expected_version = step - 1;
    return request;
  }
  std::string Save(Engine& engine, const std::string& name) const {
    const auto saved =
        engine.SaveCheckpoint({}, {.directory = folder_ / "checkpoints", .name = name});
    EXPECT_TRUE(saved.ok()) << saved.status();
    return saved.ok() ? saved->path : "";
  }
  // Writes a speculator of the kind of `options` whose numbers overflow, and has them start from
  // it.
  void StartFromOverflow(EngineOptions& options) {
    const auto engine = Make(options);
    const auto path = std::filesystem::path(Save(*engine, "start")) / "speculator";
    auto loaded = speculator::LoadSpeculator(path, {}).value();
    at::Tensor(loaded->buffer()).fill_(1e30f);
    ASSERT_TRUE(speculator::SaveSpeculator(*loaded, folder_ / "overflowing").ok());
    options.speculator = {.adapter = options.speculator.adapter, .path = folder_ / "overflowing"};
  }
  static std::string Bytes(const std::filesystem::path& path) {
    std::ifstream file(path, std::ios::binary);
    EXPECT_TRUE(file.good()) << path;
    return std::string(std::istreambuf_iterator<char>(file), {});
  }
  // The weights and moments of the speculator.
  static std::string State(const std::filesystem::path& checkpoint) {
    return Bytes(checkpoint / "speculator" / "model.safetensors") +
           Bytes(checkpoint / "speculator_optimizer.safetensors");
  }
};

}  // namespace tandem::trainer

#endif  // TANDEM_SERVICES_TRAINER_ENGINE_TESTING_SPECULATOR_FIXTURE_H_
