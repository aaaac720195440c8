// A trainer of a mixture of experts: losses of its routers, and choices that are replayed.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "common/base/errors/error.h"
#include "services/trainer/engine/testing/engine_fixture.h"

namespace tandem::trainer {
namespace {

constexpr int64_t kLayers = 2, kExperts = 5;

class TrainerExpertsTest : public TrainerEngineTest {
 protected:
  TrainerExpertsTest() { WriteTinyModel(folder_ / "model", /*seed=*/3, {}, "mixtral"); }

  // Gives the samples the experts that the model's routers choose.
  void RecordRouting(PolicyBatch& batch) const {
    const auto model = Model::Load(folder_ / "model").value();
    for (PolicySample& sample : batch.samples) {
      Trajectory& t = sample.trajectory;
      std::vector<int64_t> tokens(t.prompt_token_ids.begin(), t.prompt_token_ids.end());
      tokens.insert(tokens.end(), t.response_token_ids.begin(), t.response_token_ids.end() - 1);
      std::vector<at::Tensor> chosen(kLayers);
      RaggedBatch input = MakeRaggedBatch({tokens});
      input.routing.chosen = &chosen;
      CausalContext context;
      const at::NoGradGuard no_grad;
      model->HiddenStates(input, context);
      const at::Tensor ids = at::stack(chosen, 1).contiguous();
      t.routed_experts = {.layers = kLayers, .experts_per_token = 2, .ids = {}};
      t.routed_experts.ids.assign(ids.const_data_ptr<int64_t>(),
                                  ids.const_data_ptr<int64_t>() + ids.numel());
    }
  }
};

TEST_F(TrainerExpertsTest, ReplayOfTheRoutersOwnChoicesChangesNoBit) {
  for (const bool several : {false, true}) {
    PolicyBatch batch = TestBatch();
    if (several) {
      batch.objective.old_logprobs = OldLogprobs::kRecomputed;
      batch.objective.importance_sampling_batch_normalize = true;
      batch.objective.loss.importance_sampling_cap = 2;
    }
    const auto engine = Make(), replaying = Make();
    const StepResult chosen = Step(*engine, TestRequest(batch));
    RecordRouting(batch);
    batch.objective.routing_replay = true;
    const StepResult replayed = Step(*replaying, TestRequest(batch));
    EXPECT_EQ(replayed.report, chosen.report);
    EXPECT_EQ(Digest(*replaying), Digest(*engine));
  }
}

// A policy that is recorded with other experts has other log-probabilities.
TEST_F(TrainerExpertsTest, ReplayTakesTheRecordedExperts) {
  PolicyBatch batch = TestBatch();
  const auto engine = Make(), replaying = Make();
  RecordLogProbs(*engine, batch);
  const StepResult chosen = Step(*engine, TestRequest(batch));
  EXPECT_LT(chosen.report.metrics.at("mismatch/max_abs_logprob_diff"), 1e-5);
  ReplayRouting(batch, kLayers, kExperts);
  const StepResult replayed = Step(*replaying, TestRequest(batch));
  EXPECT_GT(replayed.report.metrics.at("mismatch/max_abs_logprob_diff"), 1e-3);
  EXPECT_NE(Digest(*replaying), Digest(*engine));
}

TEST_F(TrainerExpertsTest, ReplayNeedsARecordAndAMixtureOfExperts) {
  const auto engine = Make();
  PolicyBatch batch = TestBatch();
  batch.objective.routing_replay = true;
  absl::Status status = engine->TrainStep({}, Stamped(*engine, TestRequest(batch))).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(FieldPath(status), "samples[0].trajectory.routed_experts");

  EngineOptions options = Options();
  options.model = folder_ / "dense";
  WriteTinyModel(options.model, /*seed=*/3);
  ReplayRouting(batch, kLayers, kExperts);
  const auto dense = Make(options);
  status = dense->TrainStep({}, Stamped(*dense, TestRequest(batch))).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(FieldPath(status), "policy.routing_replay");
}

TEST_F(TrainerExpertsTest, RouterLossesEnterLossAndGradients) {
  EngineOptions options = Options();
  const auto plain = Make(options);
  options.router_losses = {.load_balancing = 0.5, .z = 0.1};
  const auto with_losses = Make(options);
  const auto metrics = Step(*plain, TestRequest()).report.metrics,
             of_losses = Step(*with_losses, TestRequest()).report.metrics;
  const double aux = metrics.at("router/aux_loss"), z = metrics.at("router/z_loss");
  EXPECT_GT(z, 0);
  EXPECT_GE(metrics.at("router/max_load_ratio"), 1);
  EXPECT_LE(metrics.at("router/max_load_ratio"), 2.5) << "5 experts, of which a token takes 2";
  EXPECT_EQ(of_losses.at("router/aux_loss"), aux) << "before the first update";
  EXPECT_NEAR(of_losses.at("loss/total"), metrics.at("loss/total") + 0.5 * aux + 0.1 * z, 1e-9);
  EXPECT_NE(of_losses.at("policy/grad_norm"), metrics.at("policy/grad_norm"));
  EXPECT_NE(Digest(*with_losses), Digest(*plain));
}

// The routers learn to take all experts alike.
TEST_F(TrainerExpertsTest, TheLoadBalancingLossFalls) {
  EngineOptions options = Options();
  options.router_losses = {.load_balancing = 10, .z = 0};
  const auto engine = Make(options);
  SupervisedBatch batch;
  for (const PolicySample& sample : TestBatch().samples) {
    batch.samples.push_back(
        {sample.trajectory.prompt_token_ids, sample.trajectory.response_token_ids});
  }
  std::vector<double> losses;
  for (int64_t step = 1; step <= 20; ++step) {
    TrainStepRequest request = TestRequest();
    request.step = step;
    request.request_id = request.payload_digest = std::to_string(step);
    request.expected_version = step - 1;
    request.batch = batch;
    losses.push_back(Step(*engine, request).report.metrics.at("router/aux_loss"));
  }
  EXPECT_LT(losses.back(), losses.front() - 0.1);
}

TEST_F(TrainerExpertsTest, RouterLossesNeedAMixtureOfExperts) {
  EngineOptions options = Options();
  options.model = folder_ / "dense";
  WriteTinyModel(options.model, /*seed=*/3);
  options.router_losses.z = 0.1;
  const absl::Status status = CreateEngine(options, nullptr).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(FieldPath(status), "router_z_loss_coef");
}

}  // namespace
}  // namespace tandem::trainer
