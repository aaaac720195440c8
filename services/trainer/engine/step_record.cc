#include "services/trainer/engine/step_record.h"

#include <limits>
#include <nlohmann/json.hpp>

#include "common/checkpoint/payload_hasher.h"

namespace tandem::trainer {
namespace {

using nlohmann::json;

using checkpoint::PayloadHasher;

void AddTo(PayloadHasher& hasher, const Trajectory& t) {
  hasher.Add(t.prompt_token_ids, t.response_token_ids, t.authorship_mask, t.author_logprobs,
             t.other_logprobs, t.log_keep_mass, t.senior_versions.size());
  for (const VersionRun& run : t.senior_versions)
    hasher.Add(run.weights.version, run.weights.digest, run.count);
  const SamplingParams& s = t.sampling;
  const TandemConfig& c = t.tandem;
  hasher.Add(t.junior_version, t.finish_reason, t.seed, t.sample_index)
      .Add(s.temperature, s.top_k, s.top_p, s.min_p, s.max_tokens, s.stop_token_ids, s.ignore_eos)
      .Add(c.enabled, c.selection_strategy, c.prob_senior, c.chunk_size, c.max_gap_tokens,
           c.boundary_token_ids);
}

void AddTo(PayloadHasher& hasher, const PolicyBatch& batch) {
  const PolicyObjective& o = batch.objective;
  hasher
      .Add(o.loss.kind, o.loss.clip_ratio_low, o.loss.clip_ratio_high, o.loss.dual_clip,
           o.loss.kl_estimator, o.loss.kl_coefficient, o.loss.entropy_coefficient,
           o.loss.importance_sampling_cap)
      .Add(o.junior_token_loss_weight, o.old_logprobs, o.advantage_estimator, o.scale.aggregation,
           o.scale.normalizer, o.scale.norm_constant, o.junior_kl_coefficient)
      .Add(o.gae_gamma, o.gae_lambda, o.bootstrap_truncated, o.whiten_advantages, o.max_staleness)
      .Add(batch.samples.size());
  for (const PolicySample& sample : batch.samples) {
    AddTo(hasher, sample.trajectory);
    hasher.Add(sample.group_id, sample.reward.has_value(), sample.reward.value_or(0),
               sample.advantages, sample.old_logprobs);
  }
}

void AddTo(PayloadHasher& hasher, const SupervisedBatch& batch) {
  hasher.Add(batch.objective.aggregation, batch.samples.size());
  for (const SupervisedSample& sample : batch.samples) {
    hasher.Add(sample.prompt_token_ids, sample.response_token_ids);
  }
}

}  // namespace

std::string PayloadDigest(const TrainStepRequest& request) {
  PayloadHasher hasher;
  hasher.Add(request.run_id, request.step, request.request_id, request.expected_version,
             request.batch.index());
  std::visit([&](const auto& batch) { AddTo(hasher, batch); }, request.batch);
  return hasher.Hex();
}

std::string EncodeReport(const StepReport& report) {
  json metrics = json::object();
  for (const auto& [name, value] : report.metrics) metrics[name] = value;
  return json{{"run_id", report.run_id},
              {"step", report.step},
              {"version", report.weights.version},
              {"digest", report.weights.digest},
              {"skipped", report.skipped},
              {"skip_reason", report.skip_reason},
              {"metrics", metrics}}
      .dump(-1, ' ', /*ensure_ascii=*/true, json::error_handler_t::replace);
}

absl::StatusOr<StepReport> DecodeReport(absl::string_view text) {
  const json parsed = json::parse(text.begin(), text.end(), nullptr, /*allow_exceptions=*/false);
  StepReport report;
  try {
    report.run_id = parsed.at("run_id");
    report.step = parsed.at("step");
    report.weights.version = parsed.at("version");
    report.weights.digest = parsed.at("digest");
    report.skipped = parsed.at("skipped");
    report.skip_reason = parsed.at("skip_reason");
    for (const auto& [name, value] : parsed.at("metrics").items()) {
      report.metrics[name] =
          value.is_null() ? std::numeric_limits<double>::quiet_NaN() : value.get<double>();
    }
  } catch (const json::exception& error) {
    return absl::DataLossError("a stored step report is broken");
  }
  return report;
}

}  // namespace tandem::trainer
