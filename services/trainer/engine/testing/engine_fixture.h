// For tests: a trainer of a tiny model with a fake critic, and the same step by autograd.
#ifndef TANDEM_SERVICES_TRAINER_ENGINE_TESTING_ENGINE_FIXTURE_H_
#define TANDEM_SERVICES_TRAINER_ENGINE_TESTING_ENGINE_FIXTURE_H_

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "common/model/testing/tiny_model_dir.h"
#include "services/trainer/engine/engine.h"
#include "services/trainer/engine/testing/batches.h"
#include "services/training_core/service/testing/resolved_options.h"
#include "services/training_core/testing/only_result.h"

namespace tandem::trainer {

// Writes a tokenizer.json of `size` tokens, the first of which is `first`.
inline void WriteTokenizer(const std::string& directory, int64_t size,
                           const std::string& first = "w0") {
  nlohmann::json vocabulary = {{first, 0}};
  for (int64_t id = 1; id < size; ++id) vocabulary[absl::StrCat("w", id)] = id;
  std::ofstream(directory + "/tokenizer.json")
      << nlohmann::json{{"model", {{"type", "WordLevel"}, {"vocab", vocabulary}}}}.dump();
}

// A critic whose value is a constant; can be told to fail, and remembers what it learnt.
class FakeCritic : public CriticConnection {
 public:
  absl::StatusOr<Values> ComputeValues(const Call&, const Step&,
                                       const std::vector<Sequence>& sequences) override {
    absl::SleepFor(delay);
    Values values;
    for (const Sequence& sequence : sequences) {
      values.values.emplace_back(sequence.response_token_ids.size(), 0.25f);
      values.final_values.push_back(0.5f);
    }
    values.weights.version = version;
    return values;
  }
  absl::StatusOr<std::map<std::string, double>> TrainStep(const Call&,
                                                          const TrainRequest& request) override {
    last = request;
    absl::SleepFor(delay);
    if (!fail.ok()) return fail;
    ++version;
    return std::map<std::string, double>{{"critic/loss", 1.5}};
  }
  int64_t version = 0;
  absl::Status fail;
  absl::Duration delay;  // of each call
  TrainRequest last;
};

class TrainerEngineTest : public ::testing::Test {
 protected:
  TrainerEngineTest() { WriteTinyModel(folder_ / "model", /*seed=*/3); }

  EngineOptions Options() const {
    EngineOptions options;
    training::SetResolvedOptions(folder_ / "model", {"compute.num_threads=1"}, &options);
    options.loss_impl = "auto";
    options.max_model_len = 64;
    options.optimizer.learning_rate = 1e-2;
    return options;
  }
  std::unique_ptr<Engine> Make(const EngineOptions& options,
                               std::shared_ptr<CriticConnection> critic = nullptr) const {
    return std::move(CreateEngine(options, std::move(critic))).value();
  }
  std::unique_ptr<Engine> Make() const { return Make(Options()); }

  static std::vector<float> LogProbsOf(Engine& engine, const std::vector<int32_t>& prompt,
                                       const std::vector<int32_t>& response,
                                       double temperature = 1) {
    const absl::StatusOr<LogProbsResult> result =
        training::OnlyResult(engine.ComputeLogProbs({}, {{{prompt, response, temperature}}}));
    EXPECT_TRUE(result.ok()) << result.status();
    return result.ok() ? result->logprobs : std::vector<float>(response.size());
  }
  // Returns options with a model whose weights are finite and whose logits are not.
  EngineOptions Overflowing() const {
    EngineOptions options = Options();
    options.model = folder_ / "overflowing";
    const at::NoGradGuard no_grad;
    const auto model = TinyModel("llama", {}, {}, /*seed=*/3);
    model->Parameter("model.norm.weight").mul_(1e30);
    model->Parameter(model->lm_head_name()).mul_(1e15);
    EXPECT_TRUE(model->Save(options.model).ok());
    return options;
  }
  // Sets the log-probs that a rollout of the engine's current weights would have recorded.
  static void RecordLogProbs(Engine& engine, PolicyBatch& batch) {
    for (PolicySample& sample : batch.samples) {
      Trajectory& t = sample.trajectory;
      t.author_logprobs =
          LogProbsOf(engine, t.prompt_token_ids, t.response_token_ids, t.sampling.temperature);
      t.other_logprobs = t.author_logprobs;
    }
  }
  // Returns the request as if the engine's weights had written its test batch.
  static TrainStepRequest Stamped(const Engine& engine, TrainStepRequest request) {
    const WeightsVersion weights = engine.Info().weights;
    if (auto* batch = std::get_if<PolicyBatch>(&request.batch)) {
      for (PolicySample& sample : batch->samples) {
        for (VersionRun& run : sample.trajectory.senior_versions) {
          if (run.weights.digest == kTestDigest) run.weights = weights;
        }
      }
    }
    return request;
  }
  static StepResult Step(Engine& engine, const TrainStepRequest& request) {
    absl::StatusOr<StepResult> result = engine.TrainStep({}, Stamped(engine, request));
    EXPECT_TRUE(result.ok()) << result.status();
    return result.ok() ? *result : StepResult{};
  }
  static std::string Digest(const Engine& engine) { return engine.Info().weights.digest; }

  TemporaryFolder folder_;
};

// A step by autograd over whole logits.
class AutogradOracle {
 public:
  explicit AutogradOracle(const std::filesystem::path& model, const LoraOptions& lora = {})
      : model_(std::move(Model::Load(model, {.requires_grad = true, .lora = lora})).value()) {}

  // Returns the logits of every response token, [T, V], from the position before it.
  at::Tensor Logits(const Trajectory& t) const {
    std::vector<int64_t> ids(t.prompt_token_ids.begin(), t.prompt_token_ids.end());
    ids.insert(ids.end(), t.response_token_ids.begin(), t.response_token_ids.end());
    const auto length = static_cast<int64_t>(t.response_token_ids.size());
    CausalContext context;
    return model_->ForwardLogits(model_->HiddenStates(MakeRaggedBatch({ids}), context))
        .slice(0, -length - 1, -1);
  }

  // Returns the log-probabilities of the response tokens, [T].
  at::Tensor LogProbs(const Trajectory& t) const {
    const std::vector<int64_t> response(t.response_token_ids.begin(), t.response_token_ids.end());
    return at::log_softmax(Logits(t), -1).gather(1, at::tensor(response).unsqueeze(1)).squeeze(1);
  }

  // Returns the norm of the gradient of `loss` with respect to all parameters that train.
  double GradientNorm(const at::Tensor& loss) const {
    loss.backward();
    double squares = 0;
    for (const auto& [name, parameter] : model_->Parameters()) {
      if (!parameter.grad().defined()) continue;  // frozen
      squares += parameter.grad().to(at::kDouble).square().sum().item<double>();
    }
    return std::sqrt(squares);
  }

 private:
  const std::unique_ptr<Model> model_;
};

}  // namespace tandem::trainer

#endif  // TANDEM_SERVICES_TRAINER_ENGINE_TESTING_ENGINE_FIXTURE_H_
