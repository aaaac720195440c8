#include "common/loss/policy_loss.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "common/base/errors/error.h"
#include "common/base/errors/not_finite.h"

namespace tandem::loss {
namespace {

struct Row {
  double c = 0, e = 0;
  PolicyMetrics metrics;
};

// One token with logp_old = 0 and scale 1.
Row Evaluate(const PolicyLossOptions& options, double logprob, double advantage,
             double reference = 0, double behaviour = 0, double log_keep_mass = 0) {
  const PolicyTokens tokens = {.old_logprobs = {0},
                               .advantages = {advantage},
                               .scales = {1},
                               .reference = {reference},
                               .behaviour = {behaviour},
                               .log_keep_mass = {log_keep_mass},
                               .authorship = {1}};
  PolicyLossEvaluator evaluator = PolicyLossEvaluator::Create(options, tokens).value();
  Row row;
  const double entropy = 0.5;
  EXPECT_TRUE(evaluator.Evaluate(0, {&logprob, 1}, {&entropy, 1}, {&row.c, 1}, {&row.e, 1}).ok());
  row.metrics = evaluator.Metrics();
  return row;
}

TEST(PolicyLossTest, RatioOneGivesMinusAdvantage) {
  const Row row = Evaluate({}, 0, 2.0);
  EXPECT_DOUBLE_EQ(row.c, -2.0);
  EXPECT_DOUBLE_EQ(row.metrics.loss_policy, -2.0);
  EXPECT_EQ(row.metrics.clip_fraction, 0);
  EXPECT_EQ(row.metrics.ppo_kl, 0);
}

TEST(PolicyLossTest, ClipIsOneSided) {
  const PolicyLossOptions options = {.clip_ratio_low = 0.1, .clip_ratio_high = 0.3};
  // Ratio 1.5: it is clipped to 1.3 for a positive advantage, and not for a negative one.
  const double up = std::log(1.5);
  EXPECT_EQ(Evaluate(options, up, 1).c, 0);
  EXPECT_DOUBLE_EQ(Evaluate(options, up, 1).metrics.loss_policy, -1.3);
  EXPECT_DOUBLE_EQ(Evaluate(options, up, -1).c, 1.5);
  // Ratio 0.5: it is clipped to 0.9 for a negative advantage, and not for a positive one.
  const double down = std::log(0.5);
  EXPECT_DOUBLE_EQ(Evaluate(options, down, 1).c, -0.5);
  EXPECT_EQ(Evaluate(options, down, -1).c, 0);
  EXPECT_DOUBLE_EQ(Evaluate(options, down, -1).metrics.loss_policy, 0.9);
  EXPECT_EQ(Evaluate(options, down, -1).metrics.clip_fraction, 1);
}

TEST(PolicyLossTest, DualClipBoundsTheLossOfNegativeAdvantages) {
  const PolicyLossOptions options = {.dual_clip = 3};
  EXPECT_DOUBLE_EQ(Evaluate(options, std::log(10.0), -2).metrics.loss_policy, 6);
  EXPECT_EQ(Evaluate(options, std::log(10.0), -2).c, 0);
  EXPECT_DOUBLE_EQ(Evaluate(options, std::log(2.0), -2).c, 4);
}

TEST(PolicyLossTest, LogRatioBeyondTwentyHasNoGradient) {
  const Row row = Evaluate({}, 30, -1);
  EXPECT_EQ(row.c, 0);
  EXPECT_DOUBLE_EQ(row.metrics.loss_policy, std::exp(20.0));
  const PolicyLossOptions k3 = {.kl_estimator = KlEstimator::kK3, .kl_coefficient = 1};
  EXPECT_EQ(Evaluate(k3, -30, 0, /*reference=*/0).c, 0);
}

TEST(PolicyLossTest, KlGradientsMatchDifferences) {
  for (KlEstimator estimator : {KlEstimator::kK1, KlEstimator::kK2, KlEstimator::kK3}) {
    const PolicyLossOptions options = {.kl_estimator = estimator, .kl_coefficient = 0.7};
    const double h = 1e-6;
    const double numeric = (Evaluate(options, 0.3 + h, 0, -0.4).metrics.loss_kl -
                            Evaluate(options, 0.3 - h, 0, -0.4).metrics.loss_kl) /
                           (2 * h);
    EXPECT_NEAR(Evaluate(options, 0.3, 0, -0.4).c, numeric, 1e-8);
  }
  const PolicyLossOptions mixed = {.kl_estimator = KlEstimator::kK3GradientK2, .kl_coefficient = 1};
  EXPECT_DOUBLE_EQ(Evaluate(mixed, 0.3, 0, -0.4).c, 0.7);
}

TEST(PolicyLossTest, K3IsCappedAndHasNoGradientBeyondTheCap) {
  PolicyLossOptions options = {
      .kl_estimator = KlEstimator::kK3, .kl_coefficient = 0.5, .k3_cap = 10};
  // exp(x) - x - 1 = 10 at x = ref - logp of about 2.6.
  const Row below = Evaluate(options, 0, 0, /*reference=*/2.5);
  EXPECT_DOUBLE_EQ(below.metrics.loss_kl, 0.5 * (std::exp(2.5) - 3.5));
  EXPECT_DOUBLE_EQ(below.c, 0.5 * (1 - std::exp(2.5)));
  const Row beyond = Evaluate(options, 0, 0, /*reference=*/2.7);
  EXPECT_DOUBLE_EQ(beyond.metrics.loss_kl, 5);
  EXPECT_EQ(beyond.c, 0);
  // Like verl's "k3+": the value is capped, the gradient is that of k2.
  options.kl_estimator = KlEstimator::kK3GradientK2;
  EXPECT_DOUBLE_EQ(Evaluate(options, 0, 0, 2.7).metrics.loss_kl, 5);
  EXPECT_DOUBLE_EQ(Evaluate(options, 0, 0, 2.7).c, 0.5 * -2.7);
}

TEST(PolicyLossTest, TheCorrectedKlIsMultipliedByTheRatio) {
  const double ratio = std::exp(0.3), d = 0.3 + 0.4;
  const PolicyLossOptions k3 = {
      .kl_estimator = KlEstimator::kK3, .kl_coefficient = 0.7, .kl_importance_correction = true};
  const Row row = Evaluate(k3, 0.3, 0, -0.4);
  EXPECT_DOUBLE_EQ(row.metrics.loss_kl, 0.7 * ratio * (std::exp(-d) + d - 1));
  EXPECT_DOUBLE_EQ(row.c, 0.7 * ratio * d);  // the gradient of k2, corrected
  for (KlEstimator estimator : {KlEstimator::kK1, KlEstimator::kK2, KlEstimator::kK3}) {
    PolicyLossOptions options = k3;
    options.kl_estimator = estimator;
    const double h = 1e-6;
    const double numeric = (Evaluate(options, 0.3 + h, 0, -0.4).metrics.loss_kl -
                            Evaluate(options, 0.3 - h, 0, -0.4).metrics.loss_kl) /
                           (2 * h);
    EXPECT_NEAR(Evaluate(options, 0.3, 0, -0.4).c, numeric, 1e-8);
  }
}

TEST(PolicyLossTest, EntropyBonusLowersTheLoss) {
  const Row row = Evaluate({.entropy_coefficient = 0.1}, 0, 0);
  EXPECT_DOUBLE_EQ(row.e, -0.1);
  EXPECT_DOUBLE_EQ(row.metrics.loss_entropy, -0.05);
}

TEST(PolicyLossTest, ImportanceWeightIsTruncatedAndConstant) {
  const PolicyLossOptions options = {.importance_sampling_cap = 2};
  EXPECT_DOUBLE_EQ(Evaluate(options, 0, 1, 0, /*behaviour=*/-std::log(1.5)).c, -1.5);
  EXPECT_DOUBLE_EQ(Evaluate(options, 0, 1, 0, /*behaviour=*/-5).c, -2);
}

TEST(PolicyLossTest, ImportanceWeightDividesByTheSamplingProbability) {
  // Top-k kept 4/5 of the mass: a token of probability 1 / 1.5 was drawn with 1 / 1.2.
  const PolicyLossOptions options = {.importance_sampling_cap = 2};
  EXPECT_DOUBLE_EQ(Evaluate(options, 0, 1, 0, -std::log(1.5), std::log(0.8)).c, -1.2);
}

TEST(PolicyLossTest, MismatchIsSplitByAuthor) {
  const PolicyTokens tokens = {.old_logprobs = {0, 0, 0},
                               .advantages = {0, 0, 0},
                               .scales = {1, 1, 1},
                               .reference = {},
                               .behaviour = {0.5, -1, -1},
                               .log_keep_mass = {},
                               .authorship = {1, 0, 1}};
  PolicyLossEvaluator evaluator = PolicyLossEvaluator::Create({}, tokens).value();
  double c[3], e[3];
  const double zeros[3] = {0, 0, 0};
  ASSERT_TRUE(evaluator.Evaluate(0, zeros, zeros, absl::MakeSpan(c), absl::MakeSpan(e)).ok());
  const PolicyMetrics metrics = evaluator.Metrics();
  EXPECT_DOUBLE_EQ(metrics.senior_mismatch.k1, -0.25);
  EXPECT_DOUBLE_EQ(metrics.senior_mismatch.max_abs_logprob_diff, 1);
  const double a = std::exp(-0.5), b = std::exp(1.0);
  EXPECT_NEAR(metrics.senior_mismatch.effective_sample_size,
              (a + b) * (a + b) / (2 * (a * a + b * b)), 1e-12);
  EXPECT_DOUBLE_EQ(metrics.junior_mismatch.k1, -1);
  EXPECT_NEAR(metrics.junior_mismatch.k3, std::exp(1.0) - 2, 1e-12);
  EXPECT_EQ(metrics.junior_mismatch.count, 1);
}

TEST(PolicyLossTest, NonFiniteRowIsRefused) {
  const PolicyTokens tokens = {.old_logprobs = {0}, .advantages = {1}, .scales = {1}};
  PolicyLossEvaluator evaluator = PolicyLossEvaluator::Create({}, tokens).value();
  const double nan = std::numeric_limits<double>::quiet_NaN(), zero = 0;
  double c, e;
  EXPECT_TRUE(IsNotFinite(evaluator.Evaluate(0, {&nan, 1}, {&zero, 1}, {&c, 1}, {&e, 1})));
}

TEST(PolicyLossTest, CispoCutsTheWeightAndKeepsTheGradient) {
  const PolicyLossOptions options = {
      .kind = PolicyLossKind::kCispo, .clip_ratio_low = 0.1, .clip_ratio_high = 0.3};
  const double up = std::log(1.5), down = std::log(0.5), inside = std::log(1.2);
  EXPECT_DOUBLE_EQ(Evaluate(options, inside, 2).c, -2.4);
  EXPECT_DOUBLE_EQ(Evaluate(options, inside, 2).metrics.loss_policy, -2.4 * inside);
  EXPECT_EQ(Evaluate(options, inside, 2).metrics.clip_fraction, 0);
  for (const double advantage : {1.0, -1.0}) {  // cut on both sides, whatever the sign
    EXPECT_DOUBLE_EQ(Evaluate(options, up, advantage).c, -1.3 * advantage);
    EXPECT_DOUBLE_EQ(Evaluate(options, down, advantage).c, -0.9 * advantage);
    EXPECT_EQ(Evaluate(options, up, advantage).metrics.clip_fraction, 1);
  }
}

// Three sequences of 3, 0 and 2 rows, with tokens of different scales.
struct Sequences {
  PolicyTokens tokens = {.old_logprobs = {-1.0, -0.5, -2.0, -0.3, -0.7},
                         .advantages = {1.5, 1.5, 1.5, -0.5, -0.5},
                         .scales = {0.2, 0.1, 0.3, 0.25, 0.15},
                         .reference = {-1.1, -0.4, -1.9, -0.2, -0.9},
                         .behaviour = {-1.2, -0.6, -2.2, -0.5, -0.6},
                         .log_keep_mass = {},
                         .authorship = {1, 0, 1, 1, 1},
                         .sequence_rows = {3, 0, 2}};
  std::vector<double> logprobs = {-0.9, -0.45, -1.95, -0.2, -0.65};

  struct Result {
    std::vector<double> c;
    PolicyMetrics metrics;
  };
  // Evaluates in runs of rows that end at `cuts`.
  Result Run(const PolicyLossOptions& options, const std::vector<size_t>& cuts = {5}) const {
    PolicyLossEvaluator evaluator = PolicyLossEvaluator::Create(options, tokens).value();
    Result result{std::vector<double>(5), {}};
    std::vector<double> entropies(5, 0.5), e(5);
    size_t begin = 0;
    for (const size_t end : cuts) {
      const auto run = [&](auto& all) { return absl::MakeSpan(all).subspan(begin, end - begin); };
      const auto first = static_cast<int64_t>(begin);
      const auto known = absl::MakeConstSpan(logprobs).subspan(begin, end - begin);
      EXPECT_TRUE(evaluator.Evaluate(first, known, run(entropies), run(result.c), run(e)).ok());
      begin = end;
    }
    result.metrics = evaluator.Metrics();
    return result;
  }
};

TEST(PolicyLossTest, GspoWeighsASequenceByItsMeanRatio) {
  const Sequences sequences;
  const PolicyLossOptions options = {.kind = PolicyLossKind::kGspo, .clip_ratio_high = 1};
  const Sequences::Result result = sequences.Run(options);
  const double first = std::exp((0.1 + 0.05 + 0.05) / 3), second = std::exp((0.1 + 0.05) / 2);
  EXPECT_NEAR(result.metrics.loss_policy, -1.5 * first * 0.6 + 0.5 * second * 0.4, 1e-14);
  for (size_t t = 0; t < 5; ++t) {
    EXPECT_NEAR(result.c[t], t < 3 ? -1.5 * first * 0.6 / 3 : 0.5 * second * 0.4 / 2, 1e-14);
  }
  EXPECT_NEAR(result.metrics.mean_ratio, (3 * first + 2 * second) / 5, 1e-14);
  EXPECT_NEAR(result.metrics.ppo_kl, -(0.1 + 0.05 + 0.05 + 0.1 + 0.05) / 5, 1e-14);
}

TEST(PolicyLossTest, GspoClipsWholeSequences) {
  Sequences sequences;
  sequences.logprobs[0] = 0;  // the first sequence's ratio: exp(1.1 / 3), above 1.2
  const Sequences::Result result = sequences.Run({.kind = PolicyLossKind::kGspo});
  for (const size_t t : {0u, 1u, 2u}) EXPECT_EQ(result.c[t], 0);
  EXPECT_GT(result.c[3], 0);
  EXPECT_DOUBLE_EQ(result.metrics.clip_fraction, 0.6);
}

TEST(PolicyLossTest, GspoGradientsMatchDifferences) {
  PolicyLossOptions options = {.kind = PolicyLossKind::kGspo,
                               .dual_clip = 3,
                               .kl_estimator = KlEstimator::kK3,
                               .kl_coefficient = 0.7};
  for (const double cap : {0.0, 1.1}) {  // the weights are constants, without a gradient
    options.importance_sampling_cap = cap;
    Sequences sequences;
    sequences.tokens.advantages = {1.5, -0.5, 0.3, -0.5, 2};  // as GAE gives them
    const Sequences::Result result = sequences.Run(options);
    for (size_t t = 0; t < 5; ++t) {
      const double h = 1e-6;
      const auto loss_at = [&](double change) {
        Sequences moved = sequences;
        moved.logprobs[t] += change;
        return moved.Run(options).metrics.loss_total;
      };
      EXPECT_NEAR(result.c[t], (loss_at(h) - loss_at(-h)) / (2 * h), 1e-8) << t << " " << cap;
    }
  }
}

TEST(PolicyLossTest, GspoDoesNotDependOnHowSequencesAreGrouped) {
  const Sequences sequences;
  const PolicyLossOptions options = {.kind = PolicyLossKind::kGspo};
  EXPECT_EQ(sequences.Run(options).c, sequences.Run(options, {3, 5}).c);
}

TEST(PolicyLossTest, GspoWithoutOldLogprobsHasRatioOne) {
  Sequences sequences;
  sequences.tokens.old_logprobs.clear();
  const Sequences::Result result = sequences.Run({.kind = PolicyLossKind::kGspo});
  EXPECT_EQ(result.metrics.mean_ratio, 1);
  EXPECT_EQ(result.metrics.ppo_kl, 0);
  EXPECT_NEAR(result.c[0], -1.5 * 0.6 / 3, 1e-15);
}

TEST(PolicyLossTest, GspoRefusesIncompleteSequences) {
  Sequences sequences;
  const PolicyLossOptions options = {.kind = PolicyLossKind::kGspo};
  PolicyLossEvaluator evaluator = PolicyLossEvaluator::Create(options, sequences.tokens).value();
  std::vector<double> entropies(2), c(2), e(2);
  const auto evaluate = [&](int64_t first) {
    const auto known = absl::MakeConstSpan(sequences.logprobs).subspan(first, 2);
    return evaluator.Evaluate(first, known, entropies, absl::MakeSpan(c), absl::MakeSpan(e)).code();
  };
  EXPECT_EQ(evaluate(0), absl::StatusCode::kInternal);
  EXPECT_EQ(evaluate(1), absl::StatusCode::kInternal);
  EXPECT_EQ(evaluate(3), absl::StatusCode::kOk);
  sequences.tokens.sequence_rows = {3, 1};
  EXPECT_EQ(FieldPath(PolicyLossEvaluator::Create(options, sequences.tokens).status()),
            "sequence_rows");
}

// The four modes of Hugging Face TRL (GRPOConfig.vllm_importance_sampling_mode), by its formulas.
TEST(PolicyLossTest, ImportanceWeightsAreBoundedByTokenAndBySequence) {
  const Sequences sequences;
  const std::vector<double>& old = sequences.tokens.old_logprobs;
  const std::vector<double>& behaviour = sequences.tokens.behaviour;
  std::vector<double> token(5), sequence(5);
  for (size_t t = 0; t < 5; ++t) token[t] = std::exp(old[t] - behaviour[t]);
  for (size_t t = 0; t < 5; ++t) {
    sequence[t] = t < 3 ? token[0] * token[1] * token[2] : token[3] * token[4];
  }
  // token: 1.22, 1.11, 1.22, 1.22, 0.90; sequence: 1.65 and 1.11
  constexpr double kCap = 1.15, kFloor = 0.95;
  for (const auto level : {ImportanceSamplingLevel::kToken, ImportanceSamplingLevel::kSequence}) {
    for (const auto mode : {ImportanceSamplingMode::kTruncate, ImportanceSamplingMode::kMask}) {
      const PolicyLossOptions options = {.clip_ratio_low = 1,
                                         .clip_ratio_high = 1e9,
                                         .importance_sampling_cap = kCap,
                                         .importance_sampling_floor = kFloor,
                                         .importance_sampling_level = level,
                                         .importance_sampling_mode = mode};
      const Sequences::Result result = sequences.Run(options);
      double loss = 0, masked = 0;
      for (size_t t = 0; t < 5; ++t) {
        double weight = level == ImportanceSamplingLevel::kToken ? token[t] : sequence[t];
        if (mode == ImportanceSamplingMode::kTruncate) {
          weight = std::min(std::max(weight, kFloor), kCap);
        } else if (weight < kFloor || weight > kCap) {
          weight = 0;
          masked += 1;
        }
        const double term = -sequences.tokens.scales[t] * weight * sequences.tokens.advantages[t] *
                            std::exp(sequences.logprobs[t] - old[t]);
        EXPECT_NEAR(result.c[t], term, 1e-15) << t;
        loss += term;
      }
      EXPECT_NEAR(result.metrics.loss_policy, loss, 1e-15);
      EXPECT_DOUBLE_EQ(result.metrics.masked_fraction, masked / 5);
      EXPECT_EQ(masked > 0, mode == ImportanceSamplingMode::kMask);
    }
  }
}

// Hugging Face TRL's get_off_policy_mask: the mean of log q - logp is -0.233 in the first sequence
// and -0.125 in the second.
TEST(PolicyLossTest, OffPolicySequencesLoseTheirTokensWithNegativeAdvantages) {
  Sequences sequences;
  sequences.tokens.advantages = {1.5, -1.5, 0, -0.5, 0.5};        // as GAE gives them
  for (double& drawn : sequences.tokens.behaviour) drawn += 0.4;  // 0.167 and 0.275
  for (const PolicyLossKind kind : {PolicyLossKind::kPpoClip, PolicyLossKind::kCispo}) {
    const Sequences::Result plain = sequences.Run({.kind = kind});
    for (const double threshold : {0.1, 0.2, 0.3}) {
      const Sequences::Result result =
          sequences.Run({.kind = kind, .off_policy_mask_threshold = threshold}, {3, 5});
      double masked = 0;
      for (size_t t = 0; t < 5; ++t) {
        const double mean = t < 3 ? 0.5 / 3 : 0.55 / 2;
        const bool mask = sequences.tokens.advantages[t] < 0 && mean > threshold;
        EXPECT_EQ(result.c[t], mask ? 0 : plain.c[t]) << t << " " << threshold;
        masked += mask;
      }
      EXPECT_DOUBLE_EQ(result.metrics.masked_fraction, masked / 5);
      EXPECT_EQ(masked, threshold == 0.1 ? 2 : threshold == 0.2 ? 1 : 0);
    }
  }
}

TEST(PolicyLossTest, AnOffPolicySequenceIsMeasuredFromWhatItWasDrawnFrom) {
  Sequences sequences;  // a cut to 0.6 of the mass: -0.125 + 0.511 in the second sequence
  sequences.tokens.log_keep_mass = std::vector<double>(5, std::log(0.6));
  EXPECT_EQ(sequences.Run({.off_policy_mask_threshold = 0.38}).metrics.masked_fraction, 0.4);
  EXPECT_EQ(sequences.Run({.off_policy_mask_threshold = 0.39}).metrics.masked_fraction, 0);
}

TEST(PolicyLossTest, AMaskedTokenKeepsItsKlAndEntropy) {
  const PolicyLossOptions options = {.kl_estimator = KlEstimator::kK1,
                                     .kl_coefficient = 0.5,
                                     .entropy_coefficient = 0.1,
                                     .importance_sampling_cap = 2,
                                     .importance_sampling_mode = ImportanceSamplingMode::kMask};
  const Row row = Evaluate(options, 0, 1, /*reference=*/-0.2, /*behaviour=*/-5);
  EXPECT_EQ(row.metrics.loss_policy, 0);
  EXPECT_DOUBLE_EQ(row.c, 0.5);
  EXPECT_DOUBLE_EQ(row.e, -0.1);
  EXPECT_EQ(row.metrics.masked_fraction, 1);
  EXPECT_EQ(Evaluate(options, 0, 1, -0.2, -0.5).metrics.masked_fraction, 0);
}

// Without old log-probs the evaluated log-probs take their place.
TEST(PolicyLossTest, SequenceWeightsWithoutOldLogprobsUseTheEvaluatedLogprobs) {
  Sequences sequences;
  sequences.tokens.old_logprobs.clear();
  const Sequences::Result result =
      sequences.Run({.importance_sampling_cap = 9,
                     .importance_sampling_level = ImportanceSamplingLevel::kSequence},
                    {3, 5});
  const double first = std::exp(0.3 + 0.15 + 0.25), second = std::exp(0.3 - 0.05);
  EXPECT_NEAR(result.c[1], -0.1 * 1.5 * first, 1e-15);
  EXPECT_NEAR(result.c[4], 0.15 * 0.5 * second, 1e-15);
}

TEST(PolicyLossTest, GspoTakesImportanceWeightsOfSequences) {
  const Sequences sequences;
  PolicyLossOptions options = {.kind = PolicyLossKind::kGspo};
  const Sequences::Result plain = sequences.Run(options);
  options.importance_sampling_cap = 1.2;
  options.importance_sampling_level = ImportanceSamplingLevel::kSequence;
  options.importance_sampling_mode = ImportanceSamplingMode::kMask;
  const Sequences::Result masked = sequences.Run(options);
  for (size_t t = 0; t < 5; ++t) {  // exp(0.5) is masked, exp(0.1) is not
    EXPECT_NEAR(masked.c[t], t < 3 ? 0 : std::exp(0.1) * plain.c[t], 1e-15);
  }
  EXPECT_DOUBLE_EQ(masked.metrics.masked_fraction, 0.6);
}

TEST(PolicyLossTest, OptionsFailClosed) {
  EXPECT_EQ(FieldPath(CheckPolicyLossOptions({.kind = PolicyLossKind::kCispo, .dual_clip = 3})),
            "dual_clip");
  EXPECT_EQ(FieldPath(CheckPolicyLossOptions({.dual_clip = 0.5})), "dual_clip");
  EXPECT_EQ(FieldPath(CheckPolicyLossOptions({.clip_ratio_low = -1})), "clip_ratio_low");
  EXPECT_EQ(FieldPath(CheckPolicyLossOptions(
                {.kind = PolicyLossKind::kGspo, .kl_importance_correction = true})),
            "kl_importance_correction");
  EXPECT_EQ(FieldPath(CheckPolicyLossOptions({.k3_cap = -1})), "k3_cap");
  EXPECT_EQ(FieldPath(CheckPolicyLossOptions({.off_policy_mask_threshold = -1})),
            "off_policy_mask_threshold");
  for (const KlEstimator estimator :
       {KlEstimator::kK1, KlEstimator::kK2, KlEstimator::kK1GradientK2}) {
    EXPECT_EQ(FieldPath(CheckPolicyLossOptions({.kl_estimator = estimator, .k3_cap = 1})),
              "k3_cap");
  }
  EXPECT_TRUE(CheckPolicyLossOptions({.kl_estimator = KlEstimator::kNone, .k3_cap = 1}).ok());
  for (const double floor : {-0.1, 2.1, std::numeric_limits<double>::quiet_NaN()}) {
    EXPECT_EQ(FieldPath(CheckPolicyLossOptions(
                  {.importance_sampling_cap = 2, .importance_sampling_floor = floor})),
              "importance_sampling_floor");
  }
  const PolicyTokens tokens = {.old_logprobs = {0}, .advantages = {1}, .scales = {1}};
  EXPECT_EQ(
      FieldPath(PolicyLossEvaluator::Create({.kl_estimator = KlEstimator::kK1}, tokens).status()),
      "reference");
  EXPECT_EQ(
      FieldPath(PolicyLossEvaluator::Create({.off_policy_mask_threshold = 1}, tokens).status()),
      "behaviour");
}

}  // namespace
}  // namespace tandem::loss
