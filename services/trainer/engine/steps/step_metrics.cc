#include "services/trainer/engine/steps/step_metrics.h"

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "common/coauthoring/authorship_mask.h"

namespace tandem::trainer {
namespace {

void AddRewardMetrics(const PolicyBatch& batch, Metrics& metrics) {
  double sum = 0, squares = 0, count = 0;
  for (const PolicySample& sample : batch.samples) {
    if (!sample.reward.has_value()) continue;
    sum += *sample.reward;
    count += 1;
  }
  if (count == 0) return;
  const double mean = sum / count;
  for (const PolicySample& sample : batch.samples) {
    if (sample.reward.has_value()) squares += (*sample.reward - mean) * (*sample.reward - mean);
  }
  metrics["reward/mean"] = mean;
  metrics["reward/std"] = count < 2 ? 0.0 : std::sqrt(squares / (count - 1));
}

}  // namespace

void AddBatchMetrics(const PolicyBatch& batch, const TokenSet* sentence_ends, Metrics& metrics) {
  AddRewardMetrics(batch, metrics);
  AuthorshipStats stats;
  double prompt_tokens = 0;
  for (const PolicySample& sample : batch.samples) {
    const Trajectory& trajectory = sample.trajectory;
    const size_t length = trajectory.response_token_ids.size();
    const auto ends = std::make_unique<bool[]>(length);
    for (size_t t = 0; t < length; ++t) {
      ends[t] =
          sentence_ends != nullptr && sentence_ends->contains(trajectory.response_token_ids[t]);
    }
    stats.Add(trajectory.authorship_mask, std::span<const bool>(ends.get(), length));
    prompt_tokens += static_cast<double>(trajectory.prompt_token_ids.size());
  }
  metrics["tandem/senior_token_fraction"] = stats.senior_token_fraction();
  metrics["tandem/junior_token_fraction"] = stats.junior_token_fraction();
  metrics["tandem/switches_per_seq"] = stats.switches_per_seq();
  if (sentence_ends != nullptr) metrics["tandem/tokens_per_sent"] = stats.tokens_per_sent();
  metrics["tokens/prompt"] = prompt_tokens;
  metrics["tokens/response"] = static_cast<double>(stats.response_tokens());
}

void AddBatchMetrics(const SupervisedBatch& batch, Metrics& metrics) {
  double prompt_tokens = 0, response_tokens = 0;
  for (const SupervisedSample& sample : batch.samples) {
    prompt_tokens += static_cast<double>(sample.prompt_token_ids.size());
    response_tokens += static_cast<double>(sample.response_token_ids.size());
  }
  metrics["tokens/prompt"] = prompt_tokens;
  metrics["tokens/response"] = response_tokens;
}

void AddRewardKlMetrics(const std::vector<double>& kl, const PolicyBatch& batch, Metrics& metrics) {
  double sum = 0;
  for (const double x : kl) sum += x;
  metrics["policy/kl_to_ref"] = kl.empty() ? 0 : sum / static_cast<double>(kl.size());
  metrics["reward/kl_penalty"] =
      batch.objective.loss.kl_coefficient * sum / static_cast<double>(batch.samples.size());
}

void AddPolicyMetrics(const loss::PolicyMetrics& policy, int64_t updates, bool has_kl,
                      Metrics& metrics) {
  const auto count = static_cast<double>(updates);
  metrics["loss/total"] = policy.loss_total / count;
  metrics["loss/policy"] = policy.loss_policy / count;
  metrics["loss/kl"] = policy.loss_kl / count;
  metrics["loss/entropy"] = policy.loss_entropy / count;
  metrics["policy/clip_fraction"] = policy.clip_fraction;
  metrics["policy/ppo_kl"] = policy.ppo_kl;
  metrics["policy/mean_ratio"] = policy.mean_ratio;
  metrics["policy/entropy"] = policy.mean_entropy;
  if (has_kl) metrics["policy/kl_to_ref"] = policy.kl_to_ref;
  metrics["mismatch/masked_fraction"] = policy.masked_fraction;
  metrics["policy/weighted_tokens"] = static_cast<double>(policy.tokens);
}

void AddMismatchMetrics(const StepMismatch& mismatch, Metrics& metrics) {
  const auto add = [&](const std::string& prefix, const loss::Mismatch& of_author) {
    if (of_author.count == 0) return;
    metrics[prefix + "k1"] = of_author.k1;
    metrics[prefix + "k3"] = of_author.k3;
    metrics[prefix + "max_abs_logprob_diff"] = of_author.max_abs_logprob_diff;
    metrics[prefix + "effective_sample_size"] = of_author.effective_sample_size;
  };
  add("mismatch/", mismatch.senior);
  add("mismatch/junior/", mismatch.junior);
}

absl::Status TeacherKlSums::Reduce(loss::MetricReduction reduce) {
  return loss::ReduceMetrics(reduce, {&rows, &kl, &loss}, {});
}

void AddJuniorKlMetrics(const TeacherKlSums& teacher_kl, int64_t updates, Metrics& metrics) {
  const double loss = teacher_kl.loss / static_cast<double>(updates);
  metrics["loss/junior_kl"] = loss;
  metrics["loss/total"] += loss;
  metrics["policy/junior_kl"] =
      teacher_kl.rows == 0 ? 0 : teacher_kl.kl / static_cast<double>(teacher_kl.rows);
}

absl::Status DistillationSums::Reduce(loss::MetricReduction reduce) {
  std::vector<loss::MetricSum> all = {&loss, &teacher_rest, &student_rest};
  for (OfTeacher& teacher : teachers) {
    all.emplace_back(&teacher.rows);
    all.emplace_back(&teacher.divergence);
  }
  return loss::ReduceMetrics(reduce, all, {});
}

void AddDistillationMetrics(const DistillationSums& sums, const DistillationRows& rows,
                            int64_t updates, Metrics& metrics) {
  const double loss = sums.loss / static_cast<double>(updates);
  metrics["loss/distillation"] = loss;
  metrics["loss/total"] += loss;
  const auto mean = [](double sum, int64_t count) {
    return count == 0 ? 0 : sum / static_cast<double>(count);
  };
  int64_t count = 0;
  double divergence = 0;
  for (size_t i = 0; i < sums.teachers.size(); ++i) {
    const DistillationSums::OfTeacher& teacher = sums.teachers[i];
    count += teacher.rows;
    divergence += teacher.divergence;
    if (rows.names[i].empty() || teacher.rows == 0) continue;
    metrics["distillation/divergence/" + rows.names[i]] = mean(teacher.divergence, teacher.rows);
  }
  metrics["distillation/divergence"] = mean(divergence, count);
  if (rows.top_tokens.count == 0) return;
  metrics["distillation/teacher_rest"] = mean(sums.teacher_rest, count);
  metrics["distillation/student_rest"] = mean(sums.student_rest, count);
}

void AddRouterMetrics(const training::RouterSums& routers, double loss, Metrics& metrics) {
  training::AddRouterMetrics(routers, /*prefix=*/"router/", metrics);
  metrics["loss/total"] += loss;
}

}  // namespace tandem::trainer
