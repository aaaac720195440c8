#include "services/trainer/engine/steps/training_rows.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "services/trainer/engine/testing/batches.h"

namespace tandem::trainer {
namespace {

using ::testing::IsEmpty;

TEST(TrainingRowsTest, OldLogProbsFollowTheChoice) {
  PolicyBatch batch = TestBatch();
  batch.samples.resize(1);
  batch.objective.junior_token_loss_weight = 1;
  Trajectory& t = batch.samples[0].trajectory;
  const auto old = [&](OldLogprobs choice) {
    batch.objective.old_logprobs = choice;
    const auto scales = PolicyScales(batch).value();
    return PolicyRows(batch, scales).tokens;
  };
  // The junior wrote token 1, so its senior log-prob is other_logprobs[1].
  ASSERT_EQ(t.authorship_mask[1], Author::kJunior);
  EXPECT_FLOAT_EQ(old(OldLogprobs::kSenior).old_logprobs[0], t.author_logprobs[0]);
  EXPECT_FLOAT_EQ(old(OldLogprobs::kSenior).old_logprobs[1], t.other_logprobs[1]);
  EXPECT_FLOAT_EQ(old(OldLogprobs::kAuthor).old_logprobs[1], t.author_logprobs[1]);
  EXPECT_THAT(old(OldLogprobs::kRecomputed).old_logprobs, IsEmpty());
  EXPECT_FLOAT_EQ(old(OldLogprobs::kSenior).behaviour[1], t.author_logprobs[1]);
}

TEST(TrainingRowsTest, ResponsesThatWereCutHaveNoWeightButStayInTheirGroup) {
  PolicyBatch batch = TestBatch();  // samples 1 and 3 were cut by length
  batch.objective.junior_token_loss_weight = 0.5;
  const Advantages advantages = PolicyAdvantages(batch, nullptr).value();
  batch.objective.mask_truncated_completions = true;
  const loss::LossScales scales = PolicyScales(batch).value();
  // token_mean over the 5 + 7 tokens of the other two samples.
  size_t row = 0;
  for (size_t i = 0; i < batch.samples.size(); ++i) {
    for (const Author author : batch.samples[i].trajectory.authorship_mask) {
      EXPECT_DOUBLE_EQ(scales.scales[row++], i % 2 == 1 ? 0 : (IsPolicy(author) ? 1.0 : 0.5) / 12)
          << i;
    }
  }
  // A group of one would have the advantage 0.
  EXPECT_EQ(PolicyAdvantages(batch, nullptr).value().advantages, advantages.advantages);
  EXPECT_LT(advantages.advantages[0][0], -0.5);
  const TrainingRows rows = PolicyRows(batch, scales);
  EXPECT_EQ(rows.tokens.sequence_rows, (std::vector<int64_t>{5, 0, 7, 0}));
  // An aggregation over all tokens counts tokens of masked responses too.
  batch.objective.scale.normalizer = loss::Normalizer::kAllTokens;
  EXPECT_DOUBLE_EQ(PolicyScales(batch).value().scales[0], 1.0 / (5 + 6 + 7 + 8));
}

TEST(TrainingRowsTest, ScalesAreThoseOfTheMiniBatch) {
  PolicyBatch batch = TestBatch();
  batch.objective.updates.num_mini_batches = 2;
  batch.objective.junior_token_loss_weight = 1;
  const loss::LossScales scales = PolicyScales(batch).value();
  for (size_t row = 0; row < scales.scales.size(); ++row) {
    EXPECT_DOUBLE_EQ(scales.scales[row], 1.0 / (row < 11 ? 5 + 6 : 7 + 8)) << row;
  }
  EXPECT_EQ(scales.total_weight, 26);
  EXPECT_EQ(scales.counted_sequences, 4);
}

TEST(TrainingRowsTest, TheJuniorTeachesTheTokensThatItWrote) {
  PolicyBatch batch = TestBatch();
  batch.samples[2].trajectory.authorship_mask.back() = Author::kJunior;
  batch.samples[3].trajectory.finish_reason = FinishReason::kLength;
  batch.objective.mask_truncated_completions = true;
  EXPECT_THAT(PolicyRows(batch, PolicyScales(batch).value()).taught.sequences.sequences(),
              IsEmpty());
  batch.objective.junior_kl_coefficient = 0.5;
  batch.samples[2].trajectory.sampling.temperature = 0.5;
  const TrainingRows rows = PolicyRows(batch, PolicyScales(batch).value());
  ASSERT_EQ(rows.taught.sequences.sequences().size(), batch.samples.size());
  size_t row = 0, expected = 0;
  for (size_t i = 0; i < batch.samples.size(); ++i) {
    const Trajectory& t = batch.samples[i].trajectory;
    EXPECT_EQ(rows.taught.sequences.sequences()[i].input, rows.sequences.sequences()[i].input);
    if (t.finish_reason == FinishReason::kLength) {
      EXPECT_THAT(rows.sequences.sequences()[i].input, IsEmpty());
      continue;
    }
    size_t own = 0;
    for (size_t k = 0; k < t.authorship_mask.size(); ++k) {
      if (IsPolicy(t.authorship_mask[k])) continue;
      EXPECT_EQ(rows.taught.sequences.sequences()[i].positions[own], static_cast<int64_t>(k) + 2);
      EXPECT_EQ(rows.taught.sequences.sequences()[i].labels[own], t.response_token_ids[k]);
      EXPECT_EQ(rows.taught.logprobs[row], t.author_logprobs[k]);
      EXPECT_EQ(rows.taught.temperatures[row], t.sampling.temperature);
      ++own, ++row;
    }
    expected += own;
  }
  EXPECT_EQ(rows.taught.scales, std::vector<double>(expected, 0.5 / static_cast<double>(expected)));
  // The junior wrote the last token, so the input is longer for the taught row only.
  EXPECT_EQ(rows.sequences.sequences()[2].input.size(), size_t{3 + 7 - 1});
}

TEST(TrainingRowsTest, PenaltiesAreTakenFromTheRewardOfTheirToken) {
  PolicyBatch batch = TestBatch();
  TokenNumbers penalties;
  for (const PolicySample& sample : batch.samples) {
    std::vector<double>& own = penalties.emplace_back();
    for (size_t t = 0; t < sample.trajectory.response_token_ids.size(); ++t) {
      own.push_back(0.1 * static_cast<double>(1 + t));
    }
  }
  const auto sum = [](double n) { return 0.1 * n * (n + 1) / 2; };
  batch.objective.advantage_estimator = AdvantageEstimator::kGroupRelativeNoStd;
  const Advantages group = PolicyAdvantages(batch, nullptr, penalties).value();
  EXPECT_NEAR(group.advantages[0][0], ((0 - sum(5)) - (1 - sum(6))) / 2, 1e-12);

  batch.objective.advantage_estimator = AdvantageEstimator::kGae;
  batch.objective.gae_gamma = 0.5;
  CriticConnection::Values values;
  for (const std::vector<double>& own : penalties) values.values.emplace_back(own.size(), 0.0f);
  values.final_values.assign(4, 0.0f);
  const Advantages gae = PolicyAdvantages(batch, &values, penalties).value();
  for (size_t i = 0; i < 4; ++i) {
    double expected = *batch.samples[i].reward;
    for (size_t t = penalties[i].size(); t-- > 0;) {
      expected -= penalties[i][t];
      EXPECT_NEAR(gae.advantages[i][t], expected, 1e-12);
      EXPECT_NEAR(gae.returns[i][t], expected, 1e-6);
      expected *= 0.5;
    }
  }
}

TEST(TrainingRowsTest, GaePassesThroughJuniorTokensAndReturnsAreNotWhitened) {
  PolicyBatch batch = TestBatch();
  batch.samples.resize(1);
  batch.objective.advantage_estimator = AdvantageEstimator::kGae;
  batch.samples[0].reward = 1;
  CriticConnection::Values values;
  values.values = {{0.1f, 0.2f, 0.3f, 0.4f, 0.5f}};
  values.final_values = {0.9f};
  const Advantages plain = PolicyAdvantages(batch, &values).value();
  // gamma = lambda = 1: return minus value, for junior tokens as well.
  for (size_t t = 0; t < 5; ++t) {
    EXPECT_NEAR(plain.advantages[0][t], 1 - values.values[0][t], 1e-6);
    EXPECT_NEAR(plain.returns[0][t], 1, 1e-6);
  }
  batch.objective.whiten_advantages = true;
  const Advantages white = PolicyAdvantages(batch, &values).value();
  EXPECT_EQ(white.returns, plain.returns);
  EXPECT_NEAR(white.advantages[0][2], 0, 1e-6);
  EXPECT_FALSE(PolicyAdvantages(batch, nullptr).ok());
}

// Follows verl's compute_gae_advantage_return, which carries value and advantage over masked
// tokens, with the reward on the last token that counts.
TEST(TrainingRowsTest, GaeMaySkipJuniorTokens) {
  PolicyBatch batch = TestBatch();
  batch.objective.advantage_estimator = AdvantageEstimator::kGae;
  batch.objective.gae_skip_junior_tokens = true;
  batch.objective.gae_gamma = 0.9;
  batch.objective.gae_lambda = 0.8;
  batch.objective.bootstrap_truncated = true;
  CriticConnection::Values values;
  for (const PolicySample& sample : batch.samples) {
    std::vector<float>& own = values.values.emplace_back();
    for (size_t t = 0; t < sample.trajectory.response_token_ids.size(); ++t) {
      own.push_back(0.1f * static_cast<float>(1 + (t * t) % 5));
    }
    values.final_values.push_back(0.7f);
  }
  batch.samples[2].trajectory.authorship_mask.back() =
      Author::kJunior;  // the junior wrote its last token
  std::vector<std::vector<double>> expected;
  std::vector<double> counted;
  for (size_t i = 0; i < batch.samples.size(); ++i) {
    const Trajectory& t = batch.samples[i].trajectory;
    std::vector<double>& own = expected.emplace_back(t.response_token_ids.size(), 0.0);
    const bool cut = t.finish_reason == FinishReason::kLength;
    double next_value = cut ? values.final_values[i] : 0, advantage = 0;
    double reward = *batch.samples[i].reward;
    for (size_t k = own.size(); k-- > 0;) {
      if (!IsPolicy(t.authorship_mask[k])) continue;
      const double value = values.values[i][k];
      advantage = reward + 0.9 * next_value - value + 0.9 * 0.8 * advantage;
      reward = 0;
      next_value = value;
      own[k] = advantage;
      counted.push_back(advantage);
    }
  }
  const Advantages plain = PolicyAdvantages(batch, &values).value();
  for (size_t i = 0; i < expected.size(); ++i) {
    for (size_t k = 0; k < expected[i].size(); ++k) {
      EXPECT_NEAR(plain.advantages[i][k], expected[i][k], 1e-12) << i << " " << k;
      EXPECT_NEAR(plain.returns[i][k], expected[i][k] + values.values[i][k], 1e-6);
    }
  }
  // Whitening is over the tokens that have an advantage.
  batch.objective.whiten_advantages = true;
  const Advantages white = PolicyAdvantages(batch, &values).value();
  loss::WhitenAdvantages(absl::MakeSpan(counted));
  size_t next = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    for (size_t k = expected[i].size(); k-- > 0;) {
      const bool senior = batch.samples[i].trajectory.authorship_mask[k] == Author::kSenior;
      EXPECT_NEAR(white.advantages[i][k], senior ? counted[next++] : 0, 1e-9);
    }
  }
}

// Puts `said` tokens of an environment behind every token of a response but the last. Its numbers
// are large, so that none of them goes unnoticed.
Trajectory WithEnvironment(const Trajectory& t, size_t said) {
  Trajectory turns = t;
  turns.response_token_ids.clear();
  turns.authorship_mask.clear();
  turns.author_logprobs.clear();
  turns.other_logprobs.clear();
  const size_t length = t.response_token_ids.size();
  for (size_t k = 0; k < length; ++k) {
    turns.response_token_ids.push_back(t.response_token_ids[k]);
    turns.authorship_mask.push_back(t.authorship_mask[k]);
    turns.author_logprobs.push_back(t.author_logprobs[k]);
    turns.other_logprobs.push_back(t.other_logprobs[k]);
    for (size_t i = 0; i < said && k + 1 < length; ++i) {
      turns.response_token_ids.push_back(2);
      turns.authorship_mask.push_back(Author::kEnvironment);
      turns.author_logprobs.push_back(-99);
      turns.other_logprobs.push_back(-99);
    }
  }
  turns.senior_versions[0].count = std::ssize(turns.response_token_ids);
  return turns;
}

// Returns the numbers of the tokens that models drew.
std::vector<double> OfModels(const Trajectory& t, const std::vector<double>& numbers) {
  std::vector<double> drawn;
  for (size_t k = 0; k < numbers.size(); ++k) {
    if (IsDrawn(t.authorship_mask[k])) drawn.push_back(numbers[k]);
  }
  return drawn;
}

// Law: what an environment says moves the tokens of models, and changes none of their numbers.
TEST(TrainingRowsTest, AnEnvironmentsTokensChangeNoNumberOfTheOthers) {
  using enum AdvantageEstimator;
  for (const AdvantageEstimator estimator : {kGroupRelative, kGae, kReinforcePlusPlus}) {
    for (const bool skips : {false, true}) {
      for (const auto aggregation :
           {loss::Aggregation::kTokenMean, loss::Aggregation::kSeqMeanTokenMean}) {
        PolicyBatch plain = TestBatch();
        if (estimator == kReinforcePlusPlus) {
          for (PolicySample& sample : plain.samples) sample.group_id.clear();
        }
        plain.objective.advantage_estimator = estimator;
        plain.objective.gae_skip_junior_tokens = skips;
        plain.objective.gae_gamma = 0.9;
        plain.objective.gae_lambda = 0.8;
        plain.objective.whiten_advantages = true;
        plain.objective.junior_token_loss_weight = skips ? 0.0 : 0.5;
        plain.objective.junior_kl_coefficient = 0.3;
        plain.objective.scale.aggregation = aggregation;
        plain.objective.scale.normalizer = loss::Normalizer::kAllTokens;
        PolicyBatch turns = plain;
        CriticConnection::Values values, all_values;
        for (size_t i = 0; i < plain.samples.size(); ++i) {
          turns.samples[i].trajectory = WithEnvironment(plain.samples[i].trajectory, i + 1);
          std::vector<float>& own = values.values.emplace_back();
          std::vector<float>& all = all_values.values.emplace_back();
          for (const Author author : turns.samples[i].trajectory.authorship_mask) {
            all.push_back(IsDrawn(author) ? 0.1f * static_cast<float>(own.size() % 4) : 50.0f);
            if (IsDrawn(author)) own.push_back(all.back());
          }
          values.final_values.push_back(0.7f);
          all_values.final_values.push_back(0.7f);
        }
        const loss::LossScales scales = PolicyScales(plain).value();
        const loss::LossScales of_turns = PolicyScales(turns).value();
        EXPECT_EQ(of_turns.total_weight, scales.total_weight);
        const Advantages expected = PolicyAdvantages(plain, &values).value();
        const Advantages got = PolicyAdvantages(turns, &all_values).value();
        size_t row = 0, row_of_turns = 0;
        for (size_t i = 0; i < plain.samples.size(); ++i) {
          const Trajectory& t = turns.samples[i].trajectory;
          EXPECT_EQ(OfModels(t, got.advantages[i]), expected.advantages[i]);
          if (estimator == kGae) {
            EXPECT_EQ(OfModels(t, {got.returns[i].begin(), got.returns[i].end()}),
                      std::vector<double>(expected.returns[i].begin(), expected.returns[i].end()));
          }
          for (const Author author : t.authorship_mask) {
            const double scale = of_turns.scales[row_of_turns++];
            EXPECT_EQ(scale, IsDrawn(author) ? scales.scales[row++] : 0.0);
          }
        }
        const TrainingRows rows = PolicyRows(plain, scales);
        const TrainingRows rows_of_turns = PolicyRows(turns, of_turns);
        EXPECT_EQ(rows_of_turns.tokens.old_logprobs, rows.tokens.old_logprobs);
        EXPECT_EQ(rows_of_turns.tokens.behaviour, rows.tokens.behaviour);
        EXPECT_EQ(rows_of_turns.tokens.authorship, rows.tokens.authorship);
        EXPECT_EQ(rows_of_turns.tokens.scales, rows.tokens.scales);
        EXPECT_EQ(rows_of_turns.taught.logprobs, rows.taught.logprobs);
        EXPECT_EQ(rows_of_turns.taught.scales, rows.taught.scales);
        for (size_t i = 0; i < plain.samples.size(); ++i) {
          EXPECT_EQ(rows_of_turns.sequences.sequences()[i].labels,
                    rows.sequences.sequences()[i].labels);
        }
      }
    }
  }
}

// Follows verl's compute_reinforce_plus_plus_outcome_advantage, with plain loops.
TEST(TrainingRowsTest, ReinforcePlusPlusWhitensDiscountedReturns) {
  PolicyBatch batch = TestBatch();
  for (PolicySample& sample : batch.samples) sample.group_id.clear();
  batch.samples[2].reward = -2.5;
  batch.objective.advantage_estimator = AdvantageEstimator::kReinforcePlusPlus;
  for (const double gamma : {1.0, 0.9}) {
    batch.objective.gae_gamma = gamma;
    std::vector<double> expected;
    for (const PolicySample& sample : batch.samples) {
      const size_t length = sample.trajectory.response_token_ids.size();
      for (size_t t = 0; t < length; ++t) {
        expected.push_back(*sample.reward * std::pow(gamma, static_cast<double>(length - 1 - t)));
      }
    }
    const auto count = static_cast<double>(expected.size());
    double mean = 0, variance = 0;
    for (const double x : expected) mean += x / count;
    for (const double x : expected) variance += (x - mean) * (x - mean) / (count - 1);
    const Advantages advantages = PolicyAdvantages(batch, nullptr).value();
    EXPECT_THAT(advantages.returns, IsEmpty());  // no critic learns
    size_t row = 0;
    for (const std::vector<double>& response : advantages.advantages) {
      for (const double a : response) {
        EXPECT_NEAR(a, (expected[row++] - mean) / std::sqrt(variance + 1e-8), 1e-12);
      }
    }
    EXPECT_EQ(row, expected.size());
  }
}

TEST(TrainingRowsTest, SupervisedRowsAreTheTokensWithAWeight) {
  SupervisedBatch batch;
  batch.objective.aggregation = loss::Aggregation::kTokenSum;
  batch.samples = {
      {.prompt_token_ids = {1}, .response_token_ids = {2, 3, 4}, .weights = {0.5f, 0, -2}},
      {.prompt_token_ids = {1}, .response_token_ids = {5}, .weights = {0}},
      {.prompt_token_ids = {1}, .response_token_ids = {6}}};
  const TrainingRows rows = SupervisedRows(batch, SupervisedScales(batch).value());
  EXPECT_EQ(rows.tokens.scales, (std::vector<double>{0.5, -2, 1}));
  EXPECT_EQ(rows.temperatures.size(), 3);
  EXPECT_EQ(rows.sequences.sequences()[0].labels, (std::vector<int64_t>{2, 4}));
  EXPECT_THAT(rows.sequences.sequences()[1].labels, IsEmpty());
  EXPECT_EQ(rows.sequences.sequences()[2].labels, (std::vector<int64_t>{6}));
}

TEST(TrainingRowsTest, ABatchWithoutAnyWeightHasAllRows) {
  SupervisedBatch batch;
  batch.objective.aggregation = loss::Aggregation::kTokenSum;
  batch.samples = {{.prompt_token_ids = {1}, .response_token_ids = {2, 3}, .weights = {0, 0}}};
  const TrainingRows rows = SupervisedRows(batch, SupervisedScales(batch).value());
  EXPECT_EQ(rows.tokens.scales, (std::vector<double>{0, 0}));
}

TEST(TrainingRowsTest, GreedyLogProbsAreThoseOfTemperatureOne) {
  Trajectory t;
  t.sampling.temperature = 0;
  EXPECT_EQ(LogProbTemperature(t), 1);
  t.sampling.temperature = 0.5;
  EXPECT_EQ(LogProbTemperature(t), 0.5);
}

}  // namespace
}  // namespace tandem::trainer
