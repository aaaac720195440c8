// A trainer whose micro-batches hold common prefixes once, beside one whose do not.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "services/trainer/engine/testing/engine_fixture.h"
#include "services/trainer/engine/testing/same_report.h"

namespace tandem::trainer {
namespace {

class SharedPrefixesTest : public TrainerEngineTest {
 protected:
  // Larger steps amplify differences in the last bits.
  EngineOptions Steady() const {
    EngineOptions options = Options();
    options.optimizer.learning_rate = 1e-3;
    options.optimizer.epsilon = 1e-5;
    return options;
  }
  static EngineOptions Sharing(EngineOptions options) {
    options.shared_prefixes = true;
    return options;
  }
  static TrainStepRequest Numbered(PolicyBatch batch, int64_t step) {
    TrainStepRequest request = TestRequest(std::move(batch));
    request.step = step;
    request.request_id = request.payload_digest = absl::StrCat(step);
    request.expected_version = step - 1;
    return request;
  }
  static PolicyBatch GroupBatch() {
    PolicyBatch batch = TestBatch();
    GiveCommonPrompts(batch);
    return batch;
  }

  // Expects three steps of both trainers to report the same, and to leave the same weights.
  void ExpectTheSameSteps(const EngineOptions& options,
                          const std::function<void(PolicyBatch& batch)>& change = {}) const {
    const auto apart = Make(options), sharing = Make(Sharing(options));
    for (int64_t step = 1; step <= 3; ++step) {
      SCOPED_TRACE(step);
      PolicyBatch batch = GroupBatch();
      if (change) change(batch);
      StepResult shared = Step(*sharing, Numbered(batch, step));
      EXPECT_GT(shared.report.metrics["policy/shared_token_fraction"], 0.1);
      shared.report.metrics.erase("policy/shared_token_fraction");
      ExpectSameReport(shared, Step(*apart, Numbered(batch, step)));
    }
    const auto a = WeightsOf(*apart), b = WeightsOf(*sharing);
    ASSERT_EQ(a.size(), b.size());
    for (size_t i = 0; i < a.size(); ++i) {
      // The learning rate is 1e-3: the last bits of a gradient weigh a hundredth of a step.
      EXPECT_LE((a[i] - b[i]).abs().max().item<double>(), 1e-5) << i;
    }
  }
  std::vector<at::Tensor> WeightsOf(Engine& engine) const {
    const std::string path = folder_ / Digest(engine);
    EXPECT_TRUE(engine.ExportModel({}, {path, ""}, DType::kFloat32).ok());
    const auto model = Model::Load(path).value();
    std::vector<at::Tensor> weights;
    for (const auto& [_, value] : model->Parameters()) weights.push_back(value.detach());
    return weights;
  }
};

TEST_F(SharedPrefixesTest, LogProbsKeepTheirBits) {
  const auto apart = Make(), sharing = Make(Sharing(Options()));
  LogProbsBatch batch;
  for (const PolicySample& sample : GroupBatch().samples) {
    batch.requests.push_back({sample.trajectory.prompt_token_ids,
                              sample.trajectory.response_token_ids, /*temperature=*/0.8});
  }
  // A later turn, whose prompt is a whole sequence and more, and one that is sent twice.
  LogProbsRequest turn = batch.requests.back();
  turn.prompt_token_ids.insert(turn.prompt_token_ids.end(), turn.response_token_ids.begin(),
                               turn.response_token_ids.end());
  batch.requests.push_back(turn);
  batch.requests.push_back(turn);
  const auto a = apart->ComputeLogProbs({}, batch), b = sharing->ComputeLogProbs({}, batch);
  ASSERT_TRUE(a.ok() && b.ok());
  for (size_t i = 0; i < batch.requests.size(); ++i) {
    EXPECT_EQ(a->results[i].logprobs, b->results[i].logprobs) << i;
    EXPECT_EQ(a->results[i].entropies, b->results[i].entropies) << i;
  }
}

TEST_F(SharedPrefixesTest, StepsAreThoseWithoutSharing) {
  EngineOptions options = Steady();
  for (const int64_t micro_batch_tokens : {30, 1000}) {
    options.micro_batch_tokens = micro_batch_tokens;
    ExpectTheSameSteps(options);
  }
}

TEST_F(SharedPrefixesTest, TheFirstStepHasRatioOneAndNoMismatch) {
  const auto engine = Make(Sharing(Options()));
  PolicyBatch batch = GroupBatch();
  RecordLogProbs(*engine, batch);  // one by one
  batch.objective.old_logprobs = OldLogprobs::kRecomputed;
  const auto metrics = Step(*engine, TestRequest(batch)).report.metrics;
  EXPECT_EQ(metrics.at("policy/ppo_kl"), 0);
  // A rounding of the recorded log-probabilities to float32.
  EXPECT_LT(metrics.at("mismatch/max_abs_logprob_diff"), 1e-6);
}

// A token of a prefix counts in the routers' losses once for each sequence that has it, and tokens
// that took other experts in the rollout are not the same.
TEST_F(SharedPrefixesTest, AMixtureOfExpertsLearnsAsWithoutSharing) {
  EngineOptions options = Steady();
  WriteTinyModel(folder_ / "mixtral", /*seed=*/3, {}, "mixtral");
  options.model = folder_ / "mixtral";
  options.router_losses = {.load_balancing = 0.5, .z = 0.1};
  ExpectTheSameSteps(options);

  const auto replay = [](PolicyBatch& batch) { ReplayRouting(batch, /*layers=*/2, 5); };
  const auto apart = Make(options), sharing = Make(Sharing(options));
  PolicyBatch batch = GroupBatch();
  replay(batch);
  StepResult shared = Step(*sharing, Numbered(batch, 1));
  EXPECT_EQ(shared.report.metrics["policy/shared_token_fraction"], 0) << "other experts";
  shared.report.metrics.erase("policy/shared_token_fraction");
  ExpectSameReport(shared, Step(*apart, Numbered(batch, 1)));
  ExpectTheSameSteps(options, [&](PolicyBatch& group) {
    replay(group);
    const auto prompt_ids = static_cast<int64_t>(kCommonPrompt.size()) * 4;
    const std::vector<uint16_t> first = group.samples[0].trajectory.routed_experts.ids;
    for (PolicySample& sample : group.samples) {
      std::copy_n(first.begin(), prompt_ids, sample.trajectory.routed_experts.ids.begin());
    }
  });
}

TEST_F(SharedPrefixesTest, AdaptersLearnAsWithoutSharing) {
  EngineOptions options = Steady();
  options.lora = {.rank = 4, .alpha = 8, .target_modules = {"all-linear"}};
  ExpectTheSameSteps(options);
}

TEST_F(SharedPrefixesTest, ASpeculatorLearnsAsWithoutSharing) {
  EngineOptions options = Steady();
  options.speculator = {.adapter = "mlp", .seed = 7, .n_predict = 2, .inner_dim = 16};
  options.speculator_optimizer = options.optimizer;
  ExpectTheSameSteps(options);
}

TEST_F(SharedPrefixesTest, TheOtherKernelsTakeTheSameSteps) {
  EngineOptions options = Steady();
  options.compute.kernels = "aten";
  ExpectTheSameSteps(options);
}

TEST_F(SharedPrefixesTest, WithoutCommonTokensNoBitChanges) {
  const auto apart = Make(), sharing = Make(Sharing(Options()));
  PolicyBatch batch = TestBatch();
  int32_t first = 1;
  for (PolicySample& sample : batch.samples) sample.trajectory.prompt_token_ids[0] = first++;
  Step(*apart, TestRequest(batch));
  EXPECT_EQ(Step(*sharing, TestRequest(batch)).report.metrics.at("policy/shared_token_fraction"),
            0);
  EXPECT_EQ(Digest(*sharing), Digest(*apart));
}

}  // namespace
}  // namespace tandem::trainer
