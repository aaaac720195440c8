#include "services/rollout/engine/generator.h"

#include <algorithm>
#include <limits>
#include <mutex>
#include <span>
#include <utility>

#include "common/base/philox.h"
#include "common/base/status_macros.h"
#include "common/tandem/tandem_sampler.h"
#include "services/rollout/engine/tell_listener.h"

namespace tandem::rollout {
namespace {

constexpr float kNotComputed = std::numeric_limits<float>::quiet_NaN();

bool HasCut(const SamplingParams& sampling) {
  return sampling.temperature > 0.0 &&
         (sampling.top_k > 0 || sampling.top_p < 1.0 || sampling.min_p > 0.0);
}

TokenSet StopTokens(const SamplingParams& sampling, std::span<const int32_t> eos_token_ids) {
  std::vector<int32_t> ids = sampling.stop_token_ids;
  if (!sampling.ignore_eos) ids.insert(ids.end(), eos_token_ids.begin(), eos_token_ids.end());
  return TokenSet(ids);
}

Trajectory MakeTrajectory(const Sequence& sequence, const std::string& junior_version) {
  const PromptRequest& request = sequence.prompt->request;
  Trajectory result;
  result.prompt_token_ids = request.prompt_token_ids;
  result.response_token_ids.assign(sequence.tokens.begin() + sequence.prompt_length(),
                                   sequence.tokens.end());
  for (const Author author : sequence.authors) {
    result.authorship_mask.push_back(static_cast<uint8_t>(author));
  }
  result.author_logprobs = sequence.author_logprobs;
  if (sequence.wants_other) result.other_logprobs = sequence.other_logprobs;
  if (HasCut(request.sampling)) result.log_keep_mass = sequence.log_keep_mass;
  for (const auto& weights : sequence.senior_weights) {
    std::vector<VersionRun>& runs = result.senior_versions;
    if (runs.empty() || runs.back().weights != *weights) {
      runs.push_back({.weights = *weights, .count = 0});
    }
    ++runs.back().count;
  }
  if (request.tandem.enabled) result.junior_version = junior_version;
  result.finish_reason = sequence.finish_reason;
  result.seed = request.seed;
  result.sample_index = sequence.sample_index;
  result.sampling = request.sampling;
  result.tandem = request.tandem;
  return result;
}

// The results of a pass's output rows. Threads fill different rows concurrently.
struct PassResults {
  explicit PassResults(size_t entries) : tokens(entries) {}
  std::vector<SampledToken> tokens;
  std::mutex mutex;
  std::map<PromptId, absl::Status> failures;
};

void TakeRow(Author lane, const std::shared_ptr<const WeightsVersion>& senior_weights,
             const PassEntry& entry, int64_t row, std::span<const float> logits,
             SampledToken& token, PassResults& results) {
  thread_local TandemSampler sampler;
  Sequence& sequence = *entry.sequence;
  const PromptRequest& request = sequence.prompt->request;
  const int64_t position = entry.end - entry.num_output_rows + row;
  absl::Status status;
  if (entry.samples && position == entry.end - 1) {
    const double u =
        Uniform(request.seed, sequence.sample_index,
                static_cast<uint32_t>(sequence.response_length()), RandomPurpose::kToken);
    auto sampled = sampler.Sample(logits, request.sampling, u);
    if (sampled.ok()) token = *sampled;
    status = sampled.status();
  } else if (sequence.NeedsOther(lane, position)) {
    const auto logprob =
        sampler.TokenLogProb(logits, request.sampling.temperature, sequence.tokens[position + 1]);
    if (logprob.ok()) {
      const int64_t r = position + 1 - sequence.prompt_length();
      sequence.other_logprobs[r] = *logprob;
      if (lane == Author::kSenior) sequence.senior_weights[r] = senior_weights;
    }
    status = logprob.status();
  }
  if (!status.ok()) {
    std::lock_guard lock(results.mutex);
    results.failures[sequence.prompt->id] = status;
  }
}

}  // namespace

Generator::Generator(const GeneratorOptions& options, const BoundarySets* boundaries,
                     ModelRunner* senior, ModelRunner* junior)
    : options_(options),
      boundaries_(boundaries),
      runners_({senior, junior}),
      scheduler_(options.limits),
      senior_weights_(std::make_shared<const WeightsVersion>(options.senior_weights)) {}

Generator::~Generator() = default;

void Generator::Submit(PromptId id, PromptRequest request,
                       std::shared_ptr<PromptListener> listener) {
  auto prompt = std::make_unique<Prompt>();
  prompt->id = id;
  prompt->stop_tokens = StopTokens(request.sampling, options_.eos_token_ids);
  prompt->max_response_tokens = std::min<int64_t>(
      request.sampling.max_tokens,
      options_.max_model_len - static_cast<int64_t>(request.prompt_token_ids.size()));
  const auto boundaries = boundaries_->Resolve(request.tandem);
  prompt->request = std::move(request);
  prompt->listener = std::move(listener);
  prompt->unfinished = prompt->request.num_samples;
  for (int64_t i = 0; i < prompt->request.num_samples; ++i) {
    prompt->samples.push_back(
        std::make_unique<Sequence>(prompt.get(), static_cast<uint64_t>(i), boundaries));
    scheduler_.Enqueue(prompt->samples.back().get());
  }
  prompts_.emplace(id, std::move(prompt));
}

void Generator::Release(Sequence* sequence) {
  scheduler_.Remove(sequence);
  for (const Author lane : kAuthors) {
    LaneState& state = sequence->lane(lane);
    if (state.slot != LaneState::kNoSlot) runner(lane).FreeSlot(state.slot);
    state = LaneState();
  }
}

void Generator::Fail(PromptId id, const absl::Status& status) {
  const auto found = prompts_.find(id);
  if (found == prompts_.end()) return;
  const std::unique_ptr<Prompt> prompt = std::move(found->second);
  prompts_.erase(found);
  for (const auto& sequence : prompt->samples) {
    if (sequence != nullptr) Release(sequence.get());
  }
  prompt->listener->OnFailed(status);
}

void Generator::FailAll(const absl::Status& status) {
  while (!prompts_.empty()) {
    TellListener([&] { Fail(prompts_.begin()->first, status); });
  }
}

void Generator::ExpireDeadlines(absl::Time now) {
  std::vector<PromptId> expired;
  for (const auto& [id, prompt] : prompts_) {
    if (prompt->request.deadline <= now) expired.push_back(id);
  }
  for (const PromptId id : expired) {
    const bool began = prompts_.at(id)->admitted;
    Fail(id, absl::DeadlineExceededError(began ? "the deadline passed during generation"
                                               : "the deadline passed in the queue"));
  }
}

bool Generator::Step() {
  for (Sequence* sequence : scheduler_.Admit()) {
    if (sequence->prompt->admitted) continue;
    sequence->prompt->admitted = true;
    totals_.prompt_tokens_total += sequence->prompt_length();
  }
  bool computed = false;
  for (const Author lane : kAuthors) computed |= RunPass(lane);
  return computed;
}

absl::Status Generator::PreparePass(Author lane, const std::vector<PassEntry>& entries) {
  for (const PassEntry& entry : entries) {
    LaneState& state = entry.sequence->lane(lane);
    if (state.slot == LaneState::kNoSlot) {
      TANDEM_ASSIGN_OR_RETURN(state.slot, runner(lane).AllocateSlot());
    }
    if (entry.copy_prefix_from != nullptr) {
      TANDEM_RETURN_IF_ERROR(runner(lane).CopyPrefix(entry.copy_prefix_from->lane(lane).slot,
                                                     state.slot, entry.begin));
    }
  }
  return absl::OkStatus();
}

bool Generator::RunPass(Author lane) {
  const std::vector<PassEntry> entries = scheduler_.Plan(lane);
  if (entries.empty()) return false;
  PassResults results(entries.size());
  absl::Status status = PreparePass(lane, entries);
  if (status.ok()) {
    std::vector<RunnerInput> inputs;
    inputs.reserve(entries.size());
    for (const PassEntry& entry : entries) {
      inputs.push_back(
          {.slot = entry.sequence->lane(lane).slot,
           .tokens =
               std::span(entry.sequence->tokens).subspan(entry.begin, entry.end - entry.begin),
           .num_output_rows = entry.num_output_rows});
    }
    status = runner(lane).Forward(inputs, [&](int64_t input, int64_t row,
                                              std::span<const float> logits) {
      TakeRow(lane, senior_weights_, entries[input], row, logits, results.tokens[input], results);
    });
  }
  ++totals_.forward_passes_total;
  if (!status.ok()) {
    for (const PassEntry& entry : entries) results.failures[entry.sequence->prompt->id] = status;
  }

  int64_t& catch_up = lane == Author::kSenior ? totals_.senior_catch_up_tokens_total
                                              : totals_.junior_catch_up_tokens_total;
  for (size_t i = 0; i < entries.size(); ++i) {
    const PassEntry& entry = entries[i];
    Sequence& sequence = *entry.sequence;
    if (results.failures.contains(sequence.prompt->id)) continue;
    scheduler_.Advance(lane, entry);
    for (int64_t p = std::max(entry.begin, sequence.prompt_length()); p < entry.end; ++p) {
      catch_up += sequence.authors[p - sequence.prompt_length()] != lane;
    }
    if (entry.samples) {
      const SampledToken& token = results.tokens[i];
      AppendToken(sequence, lane, token.token, token.logprob, token.log_keep_mass);
    }
  }
  // Prompts end last, because their end frees sequences of entries.
  std::vector<Sequence*> ended;
  for (const PassEntry& entry : entries) {
    if (!results.failures.contains(entry.sequence->prompt->id) && entry.sequence->ended()) {
      ended.push_back(entry.sequence);
    }
  }
  for (Sequence* sequence : ended) FinishIfComplete(sequence);
  for (const auto& [id, failure] : results.failures) Fail(id, failure);
  return status.ok();
}

void Generator::AppendToken(Sequence& sequence, Author author, int32_t token, float logprob,
                            float log_keep_mass) {
  const Prompt& prompt = *sequence.prompt;
  if (!sequence.authors.empty() && sequence.authors.back() != author) ++totals_.handoffs_total;
  ++(author == Author::kSenior ? totals_.senior_tokens_total : totals_.junior_tokens_total);
  sequence.tokens.push_back(token);
  sequence.authors.push_back(author);
  sequence.author_logprobs.push_back(logprob);
  sequence.other_logprobs.push_back(kNotComputed);
  sequence.log_keep_mass.push_back(log_keep_mass);
  sequence.senior_weights.push_back(senior_weights_);
  sequence.selector.OnToken(token);

  if (prompt.stop_tokens.contains(token)) {
    sequence.finish_reason = FinishReason::kStop;
  } else if (sequence.response_length() >= prompt.max_response_tokens) {
    sequence.finish_reason = FinishReason::kLength;
  }
  if (prompt.request.stream_tokens) {
    prompt.listener->OnTokens({.sample_index = sequence.sample_index,
                               .offset = sequence.response_length() - 1,
                               .token_ids = {token},
                               .authorship_mask = {static_cast<uint8_t>(author)}});
  }
}

void Generator::FinishIfComplete(Sequence* sequence) {
  if (!sequence->complete()) return;
  Prompt* const prompt = sequence->prompt;
  Release(sequence);
  const std::unique_ptr<Sequence> owned = std::move(prompt->samples[sequence->sample_index]);
  prompt->listener->OnFinished(MakeTrajectory(*owned, options_.junior_version));
  if (--prompt->unfinished == 0) prompts_.erase(prompt->id);
}

void Generator::OnSeniorUpdated(const WeightsVersion& weights, OnWeightUpdate policy) {
  senior_weights_ = std::make_shared<const WeightsVersion>(weights);
  const bool recompute = policy == OnWeightUpdate::kRecompute;
  scheduler_.BumpEpoch(Author::kSenior, recompute);
  if (!recompute) return;
  std::map<PromptId, absl::Status> failures;
  for (const Sequence* sequence : scheduler_.running()) {
    const LaneState& state = sequence->lane(Author::kSenior);
    if (state.slot == LaneState::kNoSlot) continue;
    const absl::Status truncated = runner(Author::kSenior).Truncate(state.slot, 0);
    if (!truncated.ok()) failures[sequence->prompt->id] = truncated;
  }
  for (const auto& [id, failure] : failures) Fail(id, failure);
}

void Generator::FillStats(EngineStats& stats) const {
  const EngineStats before = stats;
  stats = totals_;
  stats.kv_capacity_tokens = before.kv_capacity_tokens;
  stats.paused = before.paused;
  stats.sequences_running = running();
  stats.sequences_waiting = static_cast<int64_t>(scheduler_.waiting().size());
  for (const Sequence* sequence : scheduler_.running()) {
    stats.senior_kv_tokens += sequence->lane(Author::kSenior).cursor;
    stats.junior_kv_tokens += sequence->lane(Author::kJunior).cursor;
  }
}

}  // namespace tandem::rollout
