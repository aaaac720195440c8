#include "services/trainer/engine/steps/training_rows.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "common/base/errors/status_macros.h"
#include "common/loss/advantages.h"
#include "services/trainer/engine/steps/teacher.h"

namespace tandem::trainer {
namespace {

// Calls work(i, t, row) for token t of sample i, in the order of the rows.
void ForRows(const PolicyBatch& batch, const TrainingRows& rows,
             absl::FunctionRef<void(size_t i, size_t t, size_t row)> work) {
  size_t row = 0;
  for (size_t i = 0; i < batch.samples.size(); ++i) {
    const size_t prompt = batch.samples[i].trajectory.prompt_token_ids.size();
    for (const int64_t position : rows.sequences.sequences()[i].positions) {
      work(i, static_cast<size_t>(position) + 1 - prompt, row++);
    }
  }
}

// Returns the penalties of the tokens of sample i, or an empty span.
absl::Span<const double> PenaltiesOf(const TokenNumbers& penalties, size_t i) {
  return penalties.empty() ? absl::Span<const double>() : absl::MakeConstSpan(penalties[i]);
}

// Returns one advantage per response, which holds for all of its tokens.
absl::StatusOr<std::vector<double>> ResponseAdvantages(const PolicyBatch& batch,
                                                       const TokenNumbers& penalties) {
  std::vector<double> rewards;
  std::vector<int64_t> group_ids;
  std::map<std::string, int64_t> groups;
  for (size_t i = 0; i < batch.samples.size(); ++i) {
    const PolicySample& sample = batch.samples[i];
    const absl::Span<const double> own = PenaltiesOf(penalties, i);
    rewards.push_back(sample.reward.value_or(0) - std::accumulate(own.begin(), own.end(), 0.0));
    group_ids.push_back(
        groups.try_emplace(sample.group_id, static_cast<int64_t>(groups.size())).first->second);
  }
  const double epsilon = batch.objective.std_epsilon;
  switch (batch.objective.advantage_estimator) {
    case AdvantageEstimator::kGroupRelative:
      return loss::GroupRelativeAdvantages(rewards, group_ids, loss::RewardStd::kGroup, epsilon);
    case AdvantageEstimator::kGroupRelativeBatchStd:
      return loss::GroupRelativeAdvantages(rewards, group_ids, loss::RewardStd::kBatch, epsilon);
    case AdvantageEstimator::kGroupRelativeNoStd:
      return loss::GroupRelativeAdvantages(rewards, group_ids, loss::RewardStd::kNone);
    case AdvantageEstimator::kLeaveOneOut:
      return loss::LeaveOneOutAdvantages(rewards, group_ids);
    case AdvantageEstimator::kReinforcePlusPlus:
    case AdvantageEstimator::kGae:
    case AdvantageEstimator::kProvided:
      break;
  }
  return absl::InternalError("the estimator has no advantage per response");
}

// Returns the tokens that are steps of the trajectory.
std::vector<size_t> StepsOf(const PolicyObjective& objective, const Trajectory& trajectory) {
  std::vector<size_t> steps;
  for (size_t t = 0; t < trajectory.response_token_ids.size(); ++t) {
    if (IsStep(objective, trajectory.authorship_mask[t])) steps.push_back(t);
  }
  return steps;
}

// Returns the reward of each step. The response's reward is on its last step; `penalties` [L] are
// subtracted on their own tokens.
std::vector<double> StepRewards(const PolicySample& sample, absl::Span<const size_t> steps,
                                absl::Span<const double> penalties) {
  std::vector<double> rewards(steps.size(), 0.0);
  if (!steps.empty()) rewards.back() = sample.reward.value_or(0);
  if (penalties.empty()) return rewards;
  for (size_t i = 0; i < steps.size(); ++i) rewards[i] -= penalties[steps[i]];
  return rewards;
}

// Returns the discounted return of each step, [L]; 0 for other tokens. GAE without values.
absl::StatusOr<std::vector<double>> Returns(const PolicySample& sample,
                                            const PolicyObjective& objective,
                                            absl::Span<const double> penalties) {
  const std::vector<size_t> steps = StepsOf(objective, sample.trajectory);
  const std::vector<double> rewards = StepRewards(sample, steps, penalties);
  TANDEM_ASSIGN_OR_RETURN(
      const loss::GaeResult gae,
      loss::GeneralizedAdvantages(rewards, std::vector<double>(rewards.size() + 1, 0.0),
                                  /*truncated=*/false, {.gamma = objective.gae_gamma}));
  std::vector<double> returns(sample.trajectory.response_token_ids.size(), 0.0);
  for (size_t i = 0; i < steps.size(); ++i) returns[steps[i]] = gae.returns[i];
  return returns;
}

absl::Status AddGae(const PolicySample& sample, const PolicyObjective& objective,
                    const std::vector<float>& values, float final_value,
                    absl::Span<const double> penalties, Advantages& result) {
  const size_t length = sample.trajectory.response_token_ids.size();
  if (values.size() != length) {
    return absl::InternalError(absl::StrCat("the critic gave ", values.size(), " values for ",
                                            length, " response tokens"));
  }
  const std::vector<size_t> steps = StepsOf(objective, sample.trajectory);
  std::vector<double> states;
  for (const size_t t : steps) states.push_back(values[t]);
  states.push_back(final_value);
  TANDEM_ASSIGN_OR_RETURN(
      const loss::GaeResult gae,
      loss::GeneralizedAdvantages(StepRewards(sample, steps, penalties), states,
                                  sample.trajectory.finish_reason == FinishReason::kLength,
                                  {.gamma = objective.gae_gamma,
                                   .lambda = objective.gae_lambda,
                                   .bootstrap_truncated = objective.bootstrap_truncated}));
  std::vector<float>& returns = result.returns.emplace_back(values);
  std::vector<double>& advantages = result.advantages.emplace_back(length, 0.0);
  for (size_t i = 0; i < steps.size(); ++i) {
    returns[steps[i]] = static_cast<float>(gae.returns[i]);
    advantages[steps[i]] = gae.advantages[i];
  }
  return absl::OkStatus();
}

// Whitens the advantages over the steps of all trajectories.
void Whiten(const PolicyBatch& batch, TokenNumbers& advantages) {
  std::vector<double*> counted;
  for (size_t i = 0; i < batch.samples.size(); ++i) {
    for (const size_t t : StepsOf(batch.objective, batch.samples[i].trajectory)) {
      counted.push_back(&advantages[i][t]);
    }
  }
  std::vector<double> all;
  for (const double* advantage : counted) all.push_back(*advantage);
  loss::WhitenAdvantages(absl::MakeSpan(all));
  for (size_t i = 0; i < all.size(); ++i) *counted[i] = all[i];
}

// Returns all tokens of a sequence.
std::vector<int64_t> TextOf(const std::vector<int32_t>& prompt,
                            const std::vector<int32_t>& response) {
  std::vector<int64_t> text(prompt.begin(), prompt.end());
  text.insert(text.end(), response.begin(), response.end());
  return text;
}

// Returns the rows of the response tokens t for which `counts(t)` holds.
training::SequenceRows RowsOfTokens(const Trajectory& trajectory,
                                    absl::FunctionRef<bool(size_t t)> counts) {
  return training::SelectSequenceRows(trajectory.prompt_token_ids, trajectory.response_token_ids,
                                      counts);
}

// Adds the tokens of the sample that the teacher teaches. The senior reads a sequence once for both
// kinds of rows: `own` and the taught rows get the longer input of the two.
void AddTaughtRows(const Teacher& teacher, const PolicySample& sample,
                   const PolicyObjective& objective, training::SequenceRows& own,
                   TaughtRows& taught) {
  const Trajectory& trajectory = sample.trajectory;
  training::SequenceRows rows = RowsOfTokens(trajectory, [&](size_t t) {
    return !IsMasked(sample, objective) && teacher.teaches(trajectory, t);
  });
  if (rows.input.size() > own.input.size()) own.input = rows.input;
  rows.input = own.input;
  const size_t prompt = trajectory.prompt_token_ids.size();
  for (const int64_t position : rows.positions) {
    taught.logprobs.push_back(
        trajectory.author_logprobs[static_cast<size_t>(position) + 1 - prompt]);
    taught.temperatures.push_back(LogProbTemperature(trajectory));
  }
  taught.sequences.Add(std::move(rows));
}

void SetTaughtScales(const Teacher& teacher, const PolicyBatch& batch, TaughtRows& taught) {
  for (const training::MiniBatch& range : MiniBatches(batch)) {
    const size_t count = taught.sequences.Rows(range).size();
    taught.scales.insert(taught.scales.end(), count,
                         teacher.coefficient / static_cast<double>(std::max<size_t>(count, 1)));
  }
}

// Returns the names of the teachers of all samples.
template <typename Sample>
std::vector<std::string> TeacherNames(const std::vector<Sample>& samples) {
  std::set<std::string> names;
  for (const Sample& sample : samples) names.insert(sample.teacher.name);
  return {names.begin(), names.end()};
}

// Adds what the teacher says of response token t, whose loss has the factor `scale`.
void AddTeacherRow(const TeacherTokens& teacher, size_t t, double scale,
                   const DistillationOptions& distillation, double temperature,
                   DistillationRows& rows) {
  rows.scales.push_back(distillation.coefficient * scale);
  rows.temperatures.push_back(distillation.temperature > 0 ? distillation.temperature
                                                           : temperature);
  rows.teachers.push_back(static_cast<int32_t>(std::ranges::lower_bound(rows.names, teacher.name) -
                                               rows.names.begin()));
  const TopTokens& top = teacher.top_tokens;
  const auto first = static_cast<int64_t>(t) * top.count;
  rows.top_tokens.count = top.count;
  rows.top_tokens.ids.insert(rows.top_tokens.ids.end(), top.ids.begin() + first,
                             top.ids.begin() + first + top.count);
  rows.top_tokens.logprobs.insert(rows.top_tokens.logprobs.end(), top.logprobs.begin() + first,
                                  top.logprobs.begin() + first + top.count);
}

}  // namespace

bool IsMasked(const PolicySample& sample, const PolicyObjective& objective) {
  return objective.mask_truncated_completions &&
         sample.trajectory.finish_reason == FinishReason::kLength;
}

std::vector<training::MiniBatch> MiniBatches(const PolicyBatch& batch) {
  std::vector<size_t> groups;
  for (size_t i = 0; i < batch.samples.size(); ++i) {
    if (i == 0 || batch.samples[i].group_id != batch.samples[i - 1].group_id) groups.push_back(i);
  }
  return training::SplitIntoMiniBatches(batch.samples.size(), batch.objective.updates, groups);
}

absl::StatusOr<loss::LossScales> PolicyScales(const PolicyBatch& batch, const TokenNumbers& kept) {
  loss::LossScales all;
  for (const training::MiniBatch& range : MiniBatches(batch)) {
    // Weights of the tokens that models drew: no denominator counts others.
    std::vector<double> weights;
    std::vector<int64_t> lengths;
    for (size_t i = range.begin; i < range.end; ++i) {
      const PolicySample& sample = batch.samples[i];
      const bool counts = !IsMasked(sample, batch.objective);
      const std::vector<Author>& authors = sample.trajectory.authorship_mask;
      for (size_t t = 0; t < authors.size(); ++t) {
        if (!IsDrawn(authors[t])) continue;
        const double weight = IsPolicy(authors[t]) ? 1.0 : batch.objective.junior_token_loss_weight;
        weights.push_back(counts && (kept.empty() || kept[i][t] != 0) ? weight : 0.0);
      }
      lengths.push_back(std::ranges::count_if(authors, IsDrawn));
    }
    TANDEM_ASSIGN_OR_RETURN(const loss::LossScales own,
                            loss::ComputeLossScales(batch.objective.scale, weights, lengths));
    auto drawn = own.scales.begin();
    for (size_t i = range.begin; i < range.end; ++i) {
      for (const Author author : batch.samples[i].trajectory.authorship_mask) {
        all.scales.push_back(IsDrawn(author) ? *drawn++ : 0.0);
      }
    }
    all.total_weight += own.total_weight;
    all.counted_sequences += own.counted_sequences;
  }
  return all;
}

absl::StatusOr<loss::LossScales> SupervisedScales(const SupervisedBatch& batch) {
  std::vector<int64_t> lengths;
  int64_t total = 0;
  for (const SupervisedSample& sample : batch.samples) {
    lengths.push_back(static_cast<int64_t>(sample.response_token_ids.size()));
    total += lengths.back();
  }
  TANDEM_ASSIGN_OR_RETURN(
      loss::LossScales result,
      loss::ComputeLossScales({.aggregation = batch.objective.aggregation},
                              std::vector<double>(static_cast<size_t>(total), 1.0), lengths));
  auto scale = result.scales.begin();
  for (const SupervisedSample& sample : batch.samples) {
    for (size_t t = 0; t < sample.response_token_ids.size(); ++t, ++scale) {
      // Weights come with TOKEN_SUM alone, whose scales are 1.
      if (!sample.weights.empty()) *scale = sample.weights[t];
    }
  }
  return result;
}

absl::StatusOr<Advantages> PolicyAdvantages(const PolicyBatch& batch,
                                            const CriticConnection::Values* values,
                                            const TokenNumbers& penalties) {
  Advantages result;
  const AdvantageEstimator estimator = batch.objective.advantage_estimator;
  if (estimator == AdvantageEstimator::kProvided) {
    for (const PolicySample& sample : batch.samples) {
      result.advantages.emplace_back(sample.advantages.begin(), sample.advantages.end());
    }
  } else if (estimator == AdvantageEstimator::kGae) {
    if (values == nullptr || values->values.size() != batch.samples.size() ||
        values->final_values.size() != batch.samples.size()) {
      return absl::InternalError("the critic did not answer for every sample");
    }
    for (size_t i = 0; i < batch.samples.size(); ++i) {
      TANDEM_RETURN_IF_ERROR(AddGae(batch.samples[i], batch.objective, values->values[i],
                                    values->final_values[i], PenaltiesOf(penalties, i), result));
    }
  } else if (estimator == AdvantageEstimator::kReinforcePlusPlus) {
    for (size_t i = 0; i < batch.samples.size(); ++i) {
      TANDEM_ASSIGN_OR_RETURN(
          std::vector<double> returns,
          Returns(batch.samples[i], batch.objective, PenaltiesOf(penalties, i)));
      result.advantages.push_back(std::move(returns));
    }
  } else {
    TANDEM_ASSIGN_OR_RETURN(const std::vector<double> advantages,
                            ResponseAdvantages(batch, penalties));
    for (size_t i = 0; i < batch.samples.size(); ++i) {
      result.advantages.emplace_back(batch.samples[i].trajectory.response_token_ids.size(),
                                     advantages[i]);
    }
  }
  const bool whiten =
      batch.objective.whiten_advantages || estimator == AdvantageEstimator::kReinforcePlusPlus;
  if (whiten) Whiten(batch, result.advantages);
  return result;
}

TrainingRows PolicyRows(const PolicyBatch& batch, const loss::LossScales& scales) {
  TrainingRows rows;
  loss::PolicyTokens& tokens = rows.tokens;
  const Teacher teacher = TeacherOf(batch.objective);
  const DistillationOptions& distillation = batch.objective.distillation;
  if (distillation.is_on()) rows.distillation.names = TeacherNames(batch.samples);
  size_t begin = 0;
  for (size_t i = 0; i < batch.samples.size(); ++i) {
    const PolicySample& sample = batch.samples[i];
    const Trajectory& trajectory = sample.trajectory;
    const size_t length = trajectory.response_token_ids.size();
    const auto own = absl::MakeConstSpan(scales.scales).subspan(begin, length);
    begin += length;
    training::SequenceRows sequence =
        RowsOfTokens(trajectory, [&](size_t t) { return own[t] > 0; });
    tokens.sequence_rows.push_back(static_cast<int64_t>(sequence.labels.size()));
    if (teacher.is_on()) {
      AddTaughtRows(teacher, sample, batch.objective, sequence, rows.taught);
    }
    if (batch.objective.routing_replay) {
      const TokenExperts& experts = trajectory.routed_experts;
      sequence.routed_experts =
          absl::MakeConstSpan(experts.ids)
              .first(sequence.input.size() * static_cast<size_t>(experts.ids_per_token()));
    }
    rows.sequences.Add(std::move(sequence));
    rows.texts.push_back(TextOf(trajectory.prompt_token_ids, trajectory.response_token_ids));
    for (size_t t = 0; t < length; ++t) {
      if (!(own[t] > 0)) continue;
      const bool senior = IsPolicy(trajectory.authorship_mask[t]);
      switch (batch.objective.old_logprobs) {
        case OldLogprobs::kSenior:
          tokens.old_logprobs.push_back(senior ? trajectory.author_logprobs[t]
                                               : trajectory.other_logprobs[t]);
          break;
        case OldLogprobs::kAuthor:
          tokens.old_logprobs.push_back(trajectory.author_logprobs[t]);
          break;
        case OldLogprobs::kProvided:
          tokens.old_logprobs.push_back(sample.old_logprobs[t]);
          break;
        case OldLogprobs::kRecomputed:
          break;  // the trainer computes them
      }
      tokens.scales.push_back(own[t]);
      tokens.behaviour.push_back(trajectory.author_logprobs[t]);
      tokens.log_keep_mass.push_back(
          trajectory.log_keep_mass.empty() ? 0.0 : trajectory.log_keep_mass[t]);
      tokens.authorship.push_back(senior);
      if (HasReferenceKl(batch.objective) &&
          batch.objective.reference_logprobs == ReferenceLogprobs::kProvided) {
        tokens.reference.push_back(sample.reference_logprobs[t]);
      }
      rows.temperatures.push_back(LogProbTemperature(trajectory));
      if (distillation.is_on()) {
        AddTeacherRow(sample.teacher, t, own[t], distillation, LogProbTemperature(trajectory),
                      rows.distillation);
      }
    }
  }
  if (teacher.is_on()) SetTaughtScales(teacher, batch, rows.taught);
  return rows;
}

std::vector<double> OfRows(const TokenNumbers& numbers, const PolicyBatch& batch,
                           const TrainingRows& rows) {
  std::vector<double> own;
  ForRows(batch, rows, [&](size_t i, size_t t, size_t) { own.push_back(numbers[i][t]); });
  return own;
}

TokenNumbers OfTokens(const std::vector<double>& numbers, const PolicyBatch& batch,
                      const TrainingRows& rows) {
  TokenNumbers all;
  for (const PolicySample& sample : batch.samples) {
    all.emplace_back(sample.trajectory.response_token_ids.size(), 0.0);
  }
  ForRows(batch, rows, [&](size_t i, size_t t, size_t row) { all[i][t] = numbers[row]; });
  return all;
}

std::vector<double> ReferenceKl(const PolicyObjective& objective,
                                const loss::PolicyTokens& tokens) {
  std::vector<double> kl;
  for (size_t row = 0; row < tokens.reference.size(); ++row) {
    kl.push_back(loss::KlEstimate(objective.loss.kl_estimator, objective.loss.k3_cap,
                                  tokens.old_logprobs[row], tokens.reference[row]));
  }
  return kl;
}

TrainingRows SupervisedRows(const SupervisedBatch& batch, const loss::LossScales& scales) {
  // A batch without any weight is still an update, with gradients of 0.
  const bool learns = std::ranges::any_of(scales.scales, [](double scale) { return scale != 0; });
  TrainingRows rows;
  const DistillationOptions& distillation = batch.objective.distillation;
  if (distillation.is_on()) rows.distillation.names = TeacherNames(batch.samples);
  absl::Span<const double> rest = scales.scales;
  for (const SupervisedSample& sample : batch.samples) {
    const absl::Span<const double> own = rest.first(sample.response_token_ids.size());
    rest.remove_prefix(own.size());
    const auto counts = [&](size_t t) { return !learns || own[t] != 0; };
    rows.sequences.Add(
        training::SelectSequenceRows(sample.prompt_token_ids, sample.response_token_ids, counts));
    rows.texts.push_back(TextOf(sample.prompt_token_ids, sample.response_token_ids));
    for (size_t t = 0; t < own.size(); ++t) {
      if (!counts(t)) continue;
      rows.tokens.scales.push_back(own[t] * batch.objective.cross_entropy_coefficient);
      if (distillation.is_on()) {
        AddTeacherRow(sample.teacher, t, own[t], distillation, /*temperature=*/1,
                      rows.distillation);
      }
    }
  }
  rows.temperatures.assign(rows.tokens.scales.size(), 1.0);
  return rows;
}

double LogProbTemperature(const Trajectory& trajectory) {
  const double temperature = trajectory.sampling.temperature;
  return temperature > 0 ? temperature : 1.0;
}

}  // namespace tandem::trainer
