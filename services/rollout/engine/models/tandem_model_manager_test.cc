// Lanes that share the weights of a base model, and lanes that do not.
#include "services/rollout/engine/models/tandem_model_manager.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <memory>
#include <set>

#include "services/rollout/engine/testing/tiny_options.h"
#include "services/rollout/engine/testing/tiny_tokenizer.h"

namespace tandem::rollout {
namespace {

class TandemModelManagerTest : public ::testing::Test {
 protected:
  TandemModelManagerTest() {
    WriteTinyModelAndTokenizer(folder_ / "senior", 1);
    std::filesystem::copy(folder_ / "senior", folder_ / "copy",
                          std::filesystem::copy_options::recursive);
  }

  // A senior with adapters, and a junior in the directory `junior`.
  EngineOptions Options(const std::string& junior) const {
    EngineOptions options = TinyOptions(folder_.path());
    options.senior.lora = {.rank = 3, .alpha = 5, .target_modules = {kAllLinear}};
    options.junior.model = folder_ / junior;
    return options;
  }

  const TemporaryFolder folder_;
};

// The memory of a model's parameters: where their values, or their packed values, are.
std::set<const void*> Memory(const Model& model) {
  std::set<const void*> memory;
  for (const Parameter& parameter : model.DeclaredParameters()) {
    if (parameter.packed != nullptr) {
      memory.insert(parameter.packed.get());
    } else {
      memory.insert(parameter.value.const_data_ptr());
    }
  }
  return memory;
}

TEST_F(TandemModelManagerTest, AJuniorThatIsTheBaseModelHasTheSeniorsMemory) {
  const auto stored = [](EngineOptions options, DType dtype, Quantization quantization) {
    for (LaneOptions* lane : {&options.senior, &options.junior}) {
      lane->dtype = dtype;
      lane->quantization = quantization;
    }
    return options;
  };
  for (const auto& [dtype, quantization] : {std::pair(DType::kFloat32, Quantization::kNone),
                                            std::pair(DType::kBFloat16, Quantization::kNone),
                                            std::pair(DType::kFloat32, Quantization::kInt8)}) {
    for (const bool shares : {true, false}) {
      const EngineOptions options =
          stored(Options(shares ? "senior" : "copy"), dtype, quantization);
      const EngineRanks ranks = JoinRanks(options).value();
      const auto models = TandemModelManager::Load(options, ranks);
      ASSERT_TRUE(models.ok()) << models.status();
      const std::set<const void*> senior = Memory((*models)->senior().shard->model());
      const std::set<const void*> junior = Memory((*models)->junior().shard->model());
      std::set<const void*> both = senior;
      both.insert(junior.begin(), junior.end());
      EXPECT_GT(junior.size(), 10u);
      // A model of its own has no adapters.
      EXPECT_EQ(both.size(), shares ? senior.size() : senior.size() + junior.size());
      EXPECT_NE((*models)->senior().digest, (*models)->junior().digest);
    }
  }
}

TEST_F(TandemModelManagerTest, AJuniorThatIsStoredInAnotherWayHasItsOwnMemory) {
  EngineOptions options = Options("senior");
  options.junior.quantization = Quantization::kInt8;
  const EngineRanks ranks = JoinRanks(options).value();
  const auto models = TandemModelManager::Load(options, ranks);
  ASSERT_TRUE(models.ok()) << models.status();
  EXPECT_NE(&(*models)->senior().shard->model(), &(*models)->junior().shard->model());
}

}  // namespace
}  // namespace tandem::rollout
