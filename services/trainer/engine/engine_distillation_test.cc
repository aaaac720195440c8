// Distillation steps are those of autograd over whole logits, with adapters and without.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "common/base/errors/error.h"
#include "common/loss/logits/top_tokens_divergence.h"
#include "services/trainer/engine/testing/engine_fixture.h"

namespace tandem::trainer {
namespace {

using loss::DivergenceKind;
using ::testing::Contains;
using ::testing::Key;
using ::testing::Not;

constexpr DivergenceKind kKinds[] = {DivergenceKind::kReverse, DivergenceKind::kForward,
                                     DivergenceKind::kJensenShannon};

// Returns the divergences of rows of log-probabilities, [T].
at::Tensor DivergenceOf(const at::Tensor& p, const at::Tensor& q, const loss::Divergence& kind) {
  const auto kl = [](const at::Tensor& a, const at::Tensor& b) {
    return (a.exp() * (a - b)).sum(-1);
  };
  switch (kind.kind) {
    case DivergenceKind::kReverse:
      return kl(p, q);
    case DivergenceKind::kForward:
      return kl(q, p);
    case DivergenceKind::kJensenShannon:
      break;
  }
  const at::Tensor m = (kind.beta * q.exp() + (1 - kind.beta) * p.exp()).log();
  return kind.beta * kl(q, m) + (1 - kind.beta) * kl(p, m);
}

// Returns log-probabilities of the buckets of rows of log-probabilities [T, V], and of a teacher.
std::pair<at::Tensor, at::Tensor> Buckets(const at::Tensor& p, const TopTokens& top) {
  const at::Tensor ids =
      at::tensor(std::vector<int64_t>(top.ids.begin(), top.ids.end())).view({-1, top.count});
  const at::Tensor q = at::tensor(top.logprobs).view({-1, top.count}).exp();
  const auto with_rest = [](const at::Tensor& x) {
    return at::cat({x, (1 - x.sum(-1, true)).clamp_min(loss::kMinRest)}, 1).log();
  };
  return {with_rest(p.exp().gather(1, ids)), with_rest(q)};
}

class DistillationTest : public TrainerEngineTest {
 protected:
  EngineOptions WithTeacher() const {
    EngineOptions options = Options();
    options.teacher_model = folder_ / "teacher";
    options.micro_batch_tokens = 9;
    WriteTinyModel(options.teacher_model, /*seed=*/8, {{"hidden_size", 32}, {"head_dim", 8}});
    return options;
  }
  // Returns a batch whose policy loss has no gradient, in which the junior's tokens weigh 0.5.
  PolicyBatch WithoutRewards() const {
    PolicyBatch batch = TestBatch();
    for (PolicySample& sample : batch.samples) {
      sample.reward = 0;
      sample.trajectory.sampling.temperature = 0.8;
    }
    batch.objective.old_logprobs = OldLogprobs::kRecomputed;
    batch.objective.junior_token_loss_weight = 0.5;
    return batch;
  }
};

std::vector<float> WeightsOf(const Trajectory& t) {
  std::vector<float> weights;
  for (const Author author : t.authorship_mask) weights.push_back(IsPolicy(author) ? 1 : 0.5f);
  return weights;
}

double DivisorOf(const PolicyBatch& batch) {
  const double temperature = batch.objective.distillation.temperature;
  return temperature > 0 ? temperature : batch.samples[0].trajectory.sampling.temperature;
}

// Log-probabilities that are compared of a sample: of the vocabulary, or of buckets.
struct Compared {
  at::Tensor p, q;
};

Compared Compare(const AutogradOracle& student, const AutogradOracle& teacher,
                 const PolicySample& sample, int64_t top_k, double divisor) {
  const Trajectory& t = sample.trajectory;
  const at::Tensor p = at::log_softmax(student.Logits(t) / divisor, -1);
  if (top_k == 0) return {p, at::log_softmax(teacher.Logits(t) / divisor, -1).detach()};
  const auto [buckets, of_teacher] = Buckets(p, sample.teacher.top_tokens);
  return {buckets, of_teacher};
}

// Returns the distillation term of the loss.
at::Tensor Term(const AutogradOracle& student, const AutogradOracle& teacher,
                const PolicyBatch& batch) {
  const DistillationOptions& distillation = batch.objective.distillation;
  at::Tensor sum = at::zeros({});
  double tokens = 0;
  for (const PolicySample& sample : batch.samples) {
    const Compared compared =
        Compare(student, teacher, sample, distillation.top_k, DivisorOf(batch));
    const at::Tensor found = DivergenceOf(compared.p, compared.q, distillation.divergence);
    sum = sum + (found * at::tensor(WeightsOf(sample.trajectory))).sum();
    tokens += static_cast<double>(sample.trajectory.response_token_ids.size());
  }
  return distillation.coefficient * sum / tokens;
}

TEST_F(DistillationTest, EqualsAutogradOverWholeLogits) {
  const EngineOptions options = WithTeacher();
  const AutogradOracle teacher(options.teacher_model);
  for (const int64_t top_k : {0, 4}) {
    for (const DivergenceKind kind : kKinds) {
      for (const double temperature : {0.0, 2.0}) {
        SCOPED_TRACE(testing::Message()
                     << top_k << " " << static_cast<int>(kind) << " " << temperature);
        PolicyBatch batch = WithoutRewards();
        Distil(batch, kind, top_k);
        batch.objective.distillation.temperature = temperature;
        const double divisor = DivisorOf(batch);
        const AutogradOracle oracle(options.model);
        double tokens = 0, student_rest = 0, of_even = 0, even_tokens = 0;
        for (const PolicySample& sample : batch.samples) {
          const Compared compared = Compare(oracle, teacher, sample, top_k, divisor);
          const auto length = static_cast<double>(sample.trajectory.response_token_ids.size());
          tokens += length;
          if (top_k > 0) student_rest += compared.p.select(1, top_k).exp().sum().item<double>();
          if (sample.teacher.name != "even") continue;
          of_even += DivergenceOf(compared.p, compared.q, batch.objective.distillation.divergence)
                         .sum()
                         .item<double>();
          even_tokens += length;
        }
        const at::Tensor term = Term(oracle, teacher, batch);
        const double norm = oracle.GradientNorm(term);
        const auto engine = Make(options);
        auto metrics = Step(*engine, TestRequest(batch)).report.metrics;
        EXPECT_NEAR(metrics["loss/distillation"], term.item<double>(), 1e-5);
        EXPECT_EQ(metrics["loss/total"], metrics["loss/policy"] + metrics["loss/distillation"]);
        EXPECT_NEAR(metrics["policy/grad_norm"], norm, 1e-5 * norm);
        EXPECT_NEAR(metrics["distillation/divergence/even"], of_even / even_tokens, 1e-5);
        if (top_k == 0) {
          EXPECT_THAT(metrics, Not(Contains(Key("distillation/student_rest"))));
        } else {
          EXPECT_NEAR(metrics["distillation/student_rest"], student_rest / tokens, 1e-5);
          EXPECT_NEAR(metrics["distillation/teacher_rest"], 0.5, 0.01);
        }
      }
    }
  }
}

// The output layer is frozen: the gradient of the hidden states is all that adapters see.
TEST_F(DistillationTest, AdaptersLearnFromATeacher) {
  EngineOptions options = WithTeacher();
  options.lora = {.rank = 4, .alpha = 8, .target_modules = {kAllLinear}, .seed = 4};
  const AutogradOracle teacher(options.teacher_model);
  for (const int64_t top_k : {0, 4}) {
    for (const DivergenceKind kind : kKinds) {
      PolicyBatch batch = WithoutRewards();
      Distil(batch, kind, top_k);
      const AutogradOracle oracle(options.model, options.lora);
      const at::Tensor term = Term(oracle, teacher, batch);
      const double norm = oracle.GradientNorm(term);
      const auto engine = Make(options);
      double last = 0;
      for (int64_t step = 0; step < 3; ++step) {
        TrainStepRequest request = TestRequest(batch);
        request.request_id = request.payload_digest = std::to_string(step);
        request.step = step + 1;
        request.expected_version = step;
        auto metrics = Step(*engine, request).report.metrics;
        if (step == 0) {
          EXPECT_NEAR(metrics["loss/distillation"], term.item<double>(), 1e-5);
          EXPECT_NEAR(metrics["policy/grad_norm"], norm, 1e-5 * norm);
        } else {
          EXPECT_LT(metrics["loss/distillation"], last);
        }
        last = metrics["loss/distillation"];
      }
    }
  }
}

TEST_F(DistillationTest, AddsToAPolicyLossAndToTheKlTowardsTheJunior) {
  EngineOptions options = WithTeacher();
  options.junior_model = options.teacher_model;
  PolicyBatch batch = TestBatch();
  RecordLogProbs(*Make(), batch);
  const auto step = [&] { return Step(*Make(options), TestRequest(batch)).report.metrics; };
  const double plain = step().at("loss/total");
  batch.objective.junior_kl_coefficient = 0.1;
  const double junior = step().at("loss/junior_kl");
  batch.objective.distillation = {.coefficient = 0.2};
  const auto both = step();
  EXPECT_GT(both.at("loss/distillation"), 0.01);
  EXPECT_EQ(both.at("loss/junior_kl"), junior);
  EXPECT_NEAR(both.at("loss/total"), plain + junior + both.at("loss/distillation"), 1e-6);
}

TEST_F(DistillationTest, SeveralUpdatesLearnFromEveryTeacher) {
  PolicyBatch batch = WithoutRewards();
  Distil(batch, DivergenceKind::kForward);
  batch.objective.updates = {.num_mini_batches = 2, .num_epochs = 2};
  auto engine = Make();
  const auto metrics = Step(*engine, TestRequest(batch)).report.metrics;
  EXPECT_EQ(metrics.at("policy/updates"), 4);
  EXPECT_THAT(metrics, Contains(Key("distillation/divergence/even")));
  EXPECT_THAT(metrics, Contains(Key("distillation/divergence/odd")));
}

TEST_F(DistillationTest, ASupervisedStepLearnsFromTokensAndTeachers) {
  const EngineOptions options = WithTeacher();
  const AutogradOracle teacher(options.teacher_model);
  for (const int64_t top_k : {0, 4}) {
    for (const double cross_entropy : {0.0, 0.5}) {
      SupervisedBatch batch = {.objective = {.distillation = {.coefficient = 0.3, .top_k = top_k},
                                             .cross_entropy_coefficient = cross_entropy},
                               .samples = {}};
      const AutogradOracle oracle(options.model);
      at::Tensor sum = at::zeros({});
      double tokens = 0;
      for (const PolicySample& sample : TestBatch().samples) {
        const Trajectory& t = sample.trajectory;
        const size_t length = t.response_token_ids.size();
        batch.samples.push_back({.prompt_token_ids = t.prompt_token_ids,
                                 .response_token_ids = t.response_token_ids,
                                 .teacher = TestTeacher("t", top_k, length)});
        PolicySample taught = sample;
        taught.teacher = batch.samples.back().teacher;
        const Compared compared = Compare(oracle, teacher, taught, top_k, /*divisor=*/1);
        sum = sum + 0.3 * DivergenceOf(compared.p, compared.q, {}).sum() -
              cross_entropy * oracle.LogProbs(t).sum();
        tokens += static_cast<double>(length);
      }
      const double norm = oracle.GradientNorm(sum / tokens);
      TrainStepRequest request = TestRequest();
      request.batch = batch;
      auto metrics = Step(*Make(options), request).report.metrics;
      EXPECT_NEAR(metrics["loss/total"], sum.item<double>() / tokens, 1e-5);
      EXPECT_NEAR(metrics["policy/grad_norm"], norm, 1e-5 * norm);
      EXPECT_GT(metrics["distillation/divergence/t"], 0.01);
      EXPECT_EQ(metrics["policy/weighted_tokens"], tokens);
    }
  }
}

// The environment's tokens were given: nobody teaches them.
TEST_F(DistillationTest, TokensOfAnEnvironmentAreNotTaught) {
  PolicyBatch batch = WithoutRewards();
  Distil(batch, DivergenceKind::kReverse);
  const double all = Step(*Make(), TestRequest(batch)).report.metrics.at("policy/weighted_tokens");
  PolicyBatch fewer = batch;
  for (PolicySample& sample : fewer.samples) {
    sample.trajectory.authorship_mask[2] = Author::kEnvironment;
  }
  const auto metrics = Step(*Make(), TestRequest(fewer)).report.metrics;
  EXPECT_EQ(metrics.at("policy/weighted_tokens"), all - 4);
  // The teacher's distributions over them change nothing.
  for (PolicySample& sample : fewer.samples) {
    for (int64_t i = 0; i < 4; ++i) {
      sample.teacher.top_tokens.ids[static_cast<size_t>(8 + i)] = static_cast<int32_t>(50 + i);
    }
  }
  const auto other = Step(*Make(), TestRequest(fewer)).report.metrics;
  EXPECT_EQ(other.at("loss/distillation"), metrics.at("loss/distillation"));
  EXPECT_EQ(other.at("policy/grad_norm"), metrics.at("policy/grad_norm"));
}

TEST_F(DistillationTest, ATeacherOfAnotherVocabularyIsRefused) {
  EngineOptions options = Options();
  options.teacher_model = folder_ / "other";
  WriteTinyModel(options.teacher_model, /*seed=*/8, {{"vocab_size", 67}});
  EXPECT_EQ(FieldPath(CreateEngine(options, nullptr).status()), "teacher_model");
}

}  // namespace
}  // namespace tandem::trainer
