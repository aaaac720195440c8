#include "services/rollout/engine/schedule/generator.h"

#include <algorithm>
#include <limits>
#include <span>
#include <utility>

#include "common/base/errors/status_macros.h"
#include "common/base/steady_time.h"
#include "common/coauthoring/tandem_sampler.h"
#include "common/model/passes/layer_cache.h"
#include "services/rollout/engine/schedule/notify_listener.h"

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

Trajectory MakeTrajectory(const Sequence& sequence, const std::string& junior_version,
                          TokenExperts routed_experts) {
  const PromptRequest& request = sequence.prompt->request;
  const int64_t given = sequence.response_so_far();
  const auto take = [given](const auto& numbers, auto& result) {
    result.assign(numbers.begin() + given, numbers.end());
  };
  Trajectory result;
  result.prompt_token_ids = request.prompt_token_ids;
  result.response_offset = given;
  result.response_token_ids.assign(sequence.tokens.begin() + sequence.given_length(),
                                   sequence.tokens.end());
  take(sequence.authors, result.authorship_mask);
  take(sequence.author_logprobs, result.author_logprobs);
  if (sequence.wants_other) take(sequence.other_logprobs, result.other_logprobs);
  if (HasCut(request.sampling)) take(sequence.log_keep_mass, result.log_keep_mass);
  for (const auto& weights : std::span(sequence.senior_weights).subspan(given)) {
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
  result.routed_experts = std::move(routed_experts);
  result.top_tokens = sequence.top_tokens;
  result.top_tokens.count = request.num_top_logprobs;
  result.vision_inputs = request.vision_inputs;
  return result;
}

DraftTotals& TotalOf(SpeculativeMethod method, EngineStats& totals) {
  if (method == SpeculativeMethod::kNgram) return totals.ngram_drafts_total;
  return method == SpeculativeMethod::kJunior ? totals.junior_drafts_total
                                              : totals.heads_drafts_total;
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

void Generator::Submit(PromptId id, Submission submission) {
  PromptRequest& request = submission.request;
  auto prompt = std::make_unique<Prompt>();
  prompt->id = id;
  prompt->stream = submission.stream;
  prompt->stop_tokens = StopTokens(request.sampling, options_.eos_token_ids);
  prompt->max_response_tokens =
      std::ssize(request.response_token_ids) + LongestResponse(request, options_.request_limits);
  const auto boundaries = boundaries_->Resolve(request.tandem);
  prompt->images = ImagesOf(request, options_.request_limits).value();
  if (prompt->images[0] != nullptr) prompt->image_tokens = ImageTokensOf(*prompt->images[0]);
  prompt->request = std::move(request);
  prompt->listener = std::move(submission.listener);
  prompt->unfinished = prompt->request.num_samples;
  for (int64_t i = 0; i < prompt->request.num_samples; ++i) {
    auto sequence = std::make_unique<Sequence>(prompt.get(), static_cast<uint64_t>(i), boundaries,
                                               options_.eager_lanes);
    if (SpeculativeParams params = prompt->request.speculative;
        params.method != SpeculativeMethod::kNone) {
      if (params.method == SpeculativeMethod::kHeads) {
        params.num_speculative_tokens =
            std::min(params.num_speculative_tokens, options_.request_limits.speculator_heads);
      }
      sequence->drafts = std::make_unique<DraftState>(params, options_.make_drafter(params));
    }
    ReadTurn(*sequence);
    scheduler_.Enqueue(sequence.get());
    prompt->samples.push_back(std::move(sequence));
  }
  const SteadyTime deadline = prompt->request.deadline;
  if (deadline < SteadyTime::InfiniteFuture()) deadlines_.emplace(deadline, id);
  prompts_.emplace(id, std::move(prompt));
}

std::unique_ptr<Prompt> Generator::TakeOut(PromptId id) {
  const auto found = prompts_.find(id);
  if (found == prompts_.end()) return nullptr;
  std::unique_ptr<Prompt> prompt = std::move(found->second);
  prompts_.erase(found);
  deadlines_.erase({prompt->request.deadline, id});
  return prompt;
}

void Generator::Fail(PromptId id, const absl::Status& status) {
  if (!prompts_.contains(id)) return;
  Settle();
  Remove(id, status);
}

void Generator::Remove(PromptId id, const absl::Status& status) {
  const std::unique_ptr<Prompt> prompt = TakeOut(id);
  if (prompt == nullptr) return;
  for (const auto& sequence : prompt->samples) {
    if (sequence != nullptr) scheduler_.Remove(sequence.get());
  }
  prompt->listener->OnFailed(status);
}

void Generator::FailAll(const absl::Status& status) {
  // Nobody wants the results of passes that run, nor those that a listener's exception has left.
  ahead_.reset();
  for (const Author lane : kAuthors) {
    while (passes(lane).count > 0) {
      if (passes(lane).TakeOldest().status.ok()) runner(lane).Finish().IgnoreError();
    }
  }
  while (!prompts_.empty()) {
    NotifyListener([&] { Remove(prompts_.begin()->first, status); });
  }
}

void Generator::ExpireDeadlines(SteadyTime now) {
  if (next_deadline() <= now) Settle();  // which may end such a prompt
  while (next_deadline() <= now) {
    const PromptId id = deadlines_.begin()->second;
    const bool began = prompts_.at(id)->samples_begun > 0;
    Remove(id, absl::DeadlineExceededError(began ? "the deadline passed during generation"
                                                 : "the deadline passed in the queue"));
  }
}

bool Generator::Step() {
  for (const Prompt* prompt : scheduler_.Admit()) {
    totals_.prompt_tokens_total += prompt->request.given_tokens();
  }
  scheduler_.AskForDrafts();
  bool computed = false;
  Failures failures;
  auto [first, second] = scheduler_.LaneOrder();
  if (ahead_ == second) std::swap(first, second);
  const bool has_first = ahead_.has_value() || Start(first);
  if (has_first && !options_.eager_lanes && runner(first).RunsBehindTheHost()) {
    ahead_.reset();
    if (StartAhead(first)) ahead_ = first;
    const bool has_second = !ahead_.has_value() && Start(second);
    computed = End(first, failures);
    if (has_second) computed |= End(second, failures);
  } else {
    if (has_first) computed = End(first, failures);
    if (has_first && options_.eager_lanes) {
      scheduler_.AskForDrafts();  // again: the response has less room for them now
    }
    if ((!has_first || options_.eager_lanes) && Start(second)) computed |= End(second, failures);
  }
  RemoveFailed(failures);
  return computed;
}

void Generator::Settle() {
  if (!ahead_.has_value()) return;
  Failures failures;
  End(*std::exchange(ahead_, std::nullopt), failures);
  RemoveFailed(failures);
}

void Generator::RemoveFailed(Failures& failures) {
  if (failures.empty()) return;
  if (ahead_.has_value()) End(*std::exchange(ahead_, std::nullopt), failures);
  for (const auto& [id, failure] : failures) Remove(id, failure);
}

bool Generator::Start(Author lane) {
  const PassPlan& plan = scheduler_.Plan(lane);
  if (plan.entries.empty()) return false;
  Begin(lane, plan);
  return true;
}

bool Generator::StartAhead(Author lane) {
  const LanePasses& running = passes(lane);
  if (!running.memory[running.oldest].status.ok()) return false;  // it draws no tokens
  const PassPlan* const plan = scheduler_.PlanAhead(lane);
  if (plan == nullptr) return false;
  Begin(lane, *plan);
  return true;
}

void Generator::AskForRows(Author lane, const PassEntry& entry, LanePass& of) {
  const Sequence& sequence = *entry.sequence;
  const SamplingParams& sampling = sequence.prompt->request.sampling;
  for (int64_t position = entry.begin; position < entry.end; ++position) {
    OutputRow row = {.sampling = &sampling};
    if (position >= entry.end - entry.draws) {
      row.u = sequence.UniformAt(position + 1, RandomPurpose::kToken);
      if (!entry.drafting) row.num_top = sequence.prompt->request.num_top_logprobs;
      if (sequence.rejection_sampling()) ProposeDraft(entry, position + 1, row);
    } else if (sequence.NeedsOther(lane, position)) {
      row.token = sequence.tokens[position + 1];
    } else {
      continue;
    }
    of.rows.push_back(row);
    of.row_indices.push_back(position - entry.begin);
  }
}

void Generator::ProposeDraft(const PassEntry& entry, int64_t position, OutputRow& row) {
  const Sequence& sequence = *entry.sequence;
  DraftState& drafts = *sequence.drafts;
  if (entry.drafting) {
    // Not the number of the token: what is drawn where a draft was left out must not depend on it.
    row.u = sequence.UniformAt(position, RandomPurpose::kDraft);
    row.distribution = &drafts.next_distribution;
    return;
  }
  const int64_t index = position - sequence.length();
  if (index < std::ssize(drafts.sampled)) {
    row.proposal.token = drafts.sampled[index].token;
    row.proposal.distribution = drafts.sampled[index].distribution;
  } else if (index < std::ssize(drafts.tokens)) {
    row.proposal.token = drafts.tokens[index];
  }
  row.proposal.accept_u = sequence.UniformAt(position, RandomPurpose::kAccept);
  row.proposal.residual_u = sequence.UniformAt(position, RandomPurpose::kResidual);
}

std::span<const int32_t> Generator::TokensOf(const PassEntry& entry,
                                             std::vector<int32_t>& unconfirmed) {
  const Sequence& sequence = *entry.sequence;
  const int64_t confirmed = std::min(entry.end, sequence.length());
  if (confirmed == entry.end) {
    return std::span(sequence.tokens).subspan(entry.begin, entry.end - entry.begin);
  }
  const size_t first = unconfirmed.size();
  const auto append = [&](const std::vector<int32_t>& tokens, int64_t begin, int64_t end) {
    unconfirmed.insert(unconfirmed.end(), tokens.begin() + begin, tokens.begin() + end);
  };
  if (entry.begin < confirmed) append(sequence.tokens, entry.begin, confirmed);
  append(sequence.drafts->tokens, std::max(entry.begin, confirmed) - confirmed,
         entry.end - confirmed);
  return std::span(unconfirmed).subspan(first);
}

void Generator::Begin(Author lane, const PassPlan& plan) {
  const LanePass& before = passes(lane).memory[passes(lane).oldest];
  LanePass& of = passes(lane).Add();
  of.plan = &plan;
  of.rows.clear();
  of.row_indices.clear();
  of.row_ends.clear();
  of.inputs.clear();
  of.unconfirmed.clear();
  size_t consumed = 0;
  for (const PassEntry& entry : plan.entries) {
    ++entry.sequence->running_passes;
    AskForRows(lane, entry, of);
    of.row_ends.push_back(of.rows.size());
    if (entry.end > entry.sequence->length()) consumed += entry.end - entry.begin;
  }
  of.unconfirmed.reserve(consumed);  // spans of it stay valid
  const bool follows = plan.entries.front().follows != PassEntry::kNone;
  size_t row = 0;
  for (size_t i = 0; i < plan.entries.size(); ++i) {
    const PassEntry& entry = plan.entries[i];
    const Sequence& sequence = *entry.sequence;
    std::span<const int32_t> tokens;
    if (follows) {
      of.unconfirmed.push_back(static_cast<int32_t>(before.row_ends[entry.follows] - 1));
      tokens = std::span(of.unconfirmed).last(1);
    } else {
      tokens = TokensOf(entry, of.unconfirmed);
    }
    of.inputs.push_back(
        {.blocks = sequence.lane(lane).table.blocks(),
         .start = entry.begin,
         .tokens = tokens,
         .output_rows = std::span(of.row_indices).subspan(row, of.row_ends[i] - row),
         .records_routing = sequence.records_routing(lane),
         .images = sequence.prompt->images[LaneIndex(lane)].get()});
    row = of.row_ends[i];
  }
  ++totals_.forward_passes_total;
  of.status = runner(lane).Start(
      {.copies = plan.copies, .sequences = of.inputs, .rows = of.rows, .follows = follows},
      of.results);
}

absl::Status Generator::TakeRows(Author lane, const PassEntry& entry, const DecodeInput& input,
                                 const PassResults& all_results, size_t first) {
  const std::span results = std::span(all_results).subspan(first, input.output_rows.size());
  Sequence& sequence = *entry.sequence;
  int64_t& catch_up = lane == Author::kSenior ? totals_.senior_catch_up_tokens_total
                                              : totals_.junior_catch_up_tokens_total;
  const int64_t confirmed = std::min(entry.end, sequence.length());
  for (int64_t p = std::max(entry.begin, sequence.given_length()); p < confirmed; ++p) {
    catch_up += sequence.authors[p - sequence.prompt_length()] != lane;
  }
  const size_t num_logprobs = results.size() - entry.draws;
  for (size_t i = 0; i < num_logprobs; ++i) {
    TANDEM_RETURN_IF_ERROR(results[i].status());
    const int64_t r = entry.begin + input.output_rows[i] + 1 - sequence.prompt_length();
    sequence.other_logprobs[r] = results[i]->logprob;
    sequence.lane(lane).other_read = r + 1;
    if (lane == Author::kSenior) sequence.senior_weights[r] = senior_weights_;
  }
  TANDEM_ASSIGN_OR_RETURN(const int64_t rejected,
                          TakeDraws(lane, entry, results.subspan(num_logprobs)));
  scheduler_.Advance(lane, entry, rejected);
  if (entry.draws > 0 && lane == Author::kSenior) {
    AskHeads(sequence, (&results.back() - all_results.data()) - rejected);
  }
  return absl::OkStatus();
}

absl::StatusOr<int64_t> Generator::TakeDraws(Author lane, const PassEntry& entry,
                                             std::span<const absl::StatusOr<SampledToken>> draws) {
  Sequence& sequence = *entry.sequence;
  if (draws.empty()) return 0;
  if (entry.drafting) {
    TakeDraft(sequence, draws[0]);
    return 0;
  }
  const int64_t first = sequence.response_length();
  const auto drafted = static_cast<int64_t>(draws.size()) - 1;
  int64_t accepted = 0;
  while (true) {
    const absl::StatusOr<SampledToken>& drawn = draws[accepted];
    TANDEM_RETURN_IF_ERROR(drawn.status());
    AppendToken(sequence, lane, *drawn);
    // The next row has read the draft: it counts if that is the token. Sequence::CountUsable has
    // cut the drafts where the author changes, or a token ends the response; a text may end it,
    // too.
    if (accepted == drafted || sequence.ended() ||
        sequence.drafts->tokens[accepted] != drawn->token) {
      break;
    }
    ++accepted;
  }
  if (sequence.drafts != nullptr) CountDrafts(*sequence.drafts, drafted, accepted);
  if (sequence.prompt->request.stream_tokens) StreamTokens(sequence, first);
  return drafted - accepted;
}

void Generator::TakeDraft(Sequence& sequence, const absl::StatusOr<SampledToken>& drawn) {
  DraftState& drafts = *sequence.drafts;
  if (!drawn.ok()) {  // without drafts this row would not have been computed
    drafts.length.Pause();
    drafts.wanted = 0;
    return;
  }
  if (sequence.rejection_sampling()) {
    drafts.sampled.push_back(
        {.token = drawn->token, .distribution = std::exchange(drafts.next_distribution, {})});
  }
  drafts.tokens.push_back(drawn->token);
  if (sequence.CountUsable(drafts.tokens) == std::ssize(drafts.tokens)) return;
  drafts.tokens.pop_back();
  drafts.wanted = 0;
  drafts.closed = true;
}

void Generator::CountDrafts(DraftState& drafts, int64_t drafted, int64_t accepted) {
  drafts.length.OnPass(drafted, accepted);
  drafts.outcome.counts.drafted += drafted;
  drafts.outcome.counts.accepted += accepted;
  drafts.outcome.accepted_mask.insert(drafts.outcome.accepted_mask.end(), accepted, 1);
  drafts.outcome.accepted_mask.push_back(0);  // the token that the pass drew behind them
  TotalOf(drafts.method, totals_).Add(drafted, accepted);
}

void Generator::AskHeads(Sequence& sequence, int64_t row) {
  if (sequence.drafts == nullptr || sequence.drafts->method != SpeculativeMethod::kHeads) return;
  if (sequence.ended() || sequence.selector.NextAuthor() != Author::kSenior) return;
  const int64_t count = scheduler_.CountWanted(sequence);
  if (count == 0) return;
  head_drafts_.push_back({.sequence = &sequence, .count = count});
  draft_requests_.push_back({.row = row, .token = sequence.tokens.back()});
}

absl::Status Generator::DraftWithHeads() {
  const int64_t count = std::ranges::max(head_drafts_, {}, &HeadDrafts::count).count;
  TANDEM_RETURN_IF_ERROR(runner(Author::kSenior).Draft(draft_requests_, count, proposed_));
  if (std::ssize(proposed_) != std::ssize(draft_requests_) * count) {
    return absl::InternalError("the heads gave a different number of drafts than requested");
  }
  auto first = proposed_.begin();
  for (const HeadDrafts& one : head_drafts_) {
    one.sequence->drafts->tokens.assign(first, first + one.count);
    first += count;
  }
  return absl::OkStatus();
}

bool Generator::End(Author lane, Failures& failures) {
  LanePass& of = passes(lane).TakeOldest();
  const PassPlan& plan = *of.plan;
  for (const PassEntry& entry : plan.entries) --entry.sequence->running_passes;
  absl::Status computed = of.status;
  if (computed.ok()) computed = runner(lane).Finish();
  if (computed.ok() && of.results.size() != of.rows.size()) {
    computed = absl::InternalError("a pass returned a different number of rows than requested");
  }
  head_drafts_.clear();
  draft_requests_.clear();
  size_t first_row = 0;
  for (size_t i = 0; i < plan.entries.size(); ++i) {
    const PassEntry& entry = plan.entries[i];
    const PromptId prompt = entry.sequence->prompt->id;
    const size_t first = std::exchange(first_row, of.row_ends[i]);
    // The token of the pass before has ended the response: the row was computed for nothing.
    if (entry.follows != PassEntry::kNone && entry.sequence->ended()) continue;
    if (failures.contains(prompt)) continue;
    const absl::Status status =
        computed.ok() ? TakeRows(lane, entry, of.inputs[i], of.results, first) : computed;
    if (!status.ok()) failures[prompt] = status;
  }
  if (!head_drafts_.empty()) {
    const absl::Status drafted = DraftWithHeads();
    for (const HeadDrafts& one : head_drafts_) {
      if (!drafted.ok()) failures[one.sequence->prompt->id] = drafted;
    }
  }
  // Prompts end last, because their end frees sequences of entries.
  std::vector<Sequence*> ended;
  for (const PassEntry& entry : plan.entries) {
    if (!failures.contains(entry.sequence->prompt->id) && entry.sequence->ended()) {
      ended.push_back(entry.sequence);
    }
  }
  for (Sequence* sequence : ended) {
    const PromptId prompt = sequence->prompt->id;
    const absl::Status finished = FinishIfComplete(sequence);
    if (!finished.ok()) failures[prompt] = finished;
  }
  return computed.ok();
}

void Generator::AppendToken(Sequence& sequence, Author author, const SampledToken& sampled) {
  const int32_t token = sampled.token;
  const Prompt& prompt = *sequence.prompt;
  if (!sequence.authors.empty() && IsDrawn(sequence.authors.back()) &&
      sequence.authors.back() != author) {
    ++totals_.handoffs_total;
  }
  ++(author == Author::kSenior ? totals_.senior_tokens_total : totals_.junior_tokens_total);
  sequence.tokens.push_back(token);
  sequence.authors.push_back(author);
  sequence.author_logprobs.push_back(sampled.logprob);
  sequence.other_logprobs.push_back(kNotComputed);
  sequence.log_keep_mass.push_back(sampled.log_keep_mass);
  for (const LikelyToken& likely : sampled.top) {
    sequence.top_tokens.ids.push_back(likely.token);
    sequence.top_tokens.logprobs.push_back(likely.logprob);
  }
  sequence.senior_weights.push_back(senior_weights_);
  sequence.selector.OnToken(token);

  if (prompt.stop_tokens.contains(token) || CompletesStopText(sequence, token)) {
    sequence.finish_reason = FinishReason::kStop;
  } else if (sequence.response_length() >= prompt.max_response_tokens) {
    sequence.finish_reason = FinishReason::kLength;
  }
}

void Generator::ReadTurn(Sequence& sequence) const {
  const PromptRequest& request = sequence.prompt->request;
  if (!sequence.stop_texts.active()) return;
  const auto& authors = request.response_authors;
  const auto begin =
      std::find_if_not(authors.rbegin(), authors.rend(), IsDrawn).base() - authors.begin();
  for (const int32_t token : std::span(request.response_token_ids).subspan(begin)) {
    // A text that ended the turn does not end its continuation, too.
    if (CompletesStopText(sequence, token)) {
      sequence.stop_texts = StopTextFinder(request.sampling.stop);
    }
  }
}

bool Generator::CompletesStopText(Sequence& sequence, int32_t token) const {
  if (!sequence.stop_texts.active() || options_.vocabulary->is_special(token)) return false;
  return sequence.stop_texts.OnText(options_.vocabulary->Decode(token));
}

void Generator::StreamTokens(const Sequence& sequence, int64_t first) {
  TokensDelta delta = {.sample_index = sequence.sample_index,
                       .offset = first,
                       .token_ids = {sequence.tokens.begin() + sequence.prompt_length() + first,
                                     sequence.tokens.end()},
                       .authorship_mask = {}};
  for (int64_t r = first; r < sequence.response_length(); ++r) {
    delta.authorship_mask.push_back(sequence.authors[r]);
  }
  sequence.prompt->listener->OnTokens(std::move(delta));
}

absl::Status Generator::FinishIfComplete(Sequence* sequence) {
  // A pass that runs writes into its blocks.
  if (sequence->running_passes > 0 || !sequence->complete()) return absl::OkStatus();
  Prompt* const prompt = sequence->prompt;
  TokenExperts routed_experts;
  if (sequence->records_routing(Author::kSenior)) {
    TANDEM_RETURN_IF_ERROR(runner(Author::kSenior)
                               .ReadRouting(sequence->lane(Author::kSenior).table.blocks(),
                                            sequence->length() - 1, routed_experts));
  }
  scheduler_.Remove(sequence);
  const std::unique_ptr<Sequence> owned = std::move(prompt->samples[sequence->number]);
  SampleDrafts drafts;
  if (owned->drafts != nullptr) drafts = std::move(owned->drafts->outcome);
  prompt->listener->OnFinished(
      MakeTrajectory(*owned, options_.junior_version, std::move(routed_experts)),
      std::move(drafts));
  if (--prompt->unfinished == 0) TakeOut(prompt->id);
  return absl::OkStatus();
}

void Generator::OnSeniorUpdated(const WeightsVersion& weights, OnWeightUpdate policy) {
  const bool same = weights.digest == senior_weights_->digest;
  senior_weights_ = std::make_shared<const WeightsVersion>(weights);
  if (same) return;  // a new version of the same values: nothing is out of date
  scheduler_.BumpEpoch(Author::kSenior, policy == OnWeightUpdate::kRecompute);
}

void Generator::FillStats(EngineStats& stats) const {
  const EngineStats before = stats;
  stats = totals_;
  stats.kv_capacity_tokens = before.kv_capacity_tokens;
  stats.paused = before.paused;
  stats.preemptions_total = scheduler_.preemptions_total();
  stats.shared_prefix_tokens_total = scheduler_.shared_tokens_total();
  stats.sequences_running = running();
  stats.sequences_waiting = scheduler_.num_waiting();
  stats.senior_kv_tokens = scheduler_.num_held_blocks(Author::kSenior) * kKvBlockTokens;
  stats.junior_kv_tokens = scheduler_.num_held_blocks(Author::kJunior) * kKvBlockTokens;
}

}  // namespace tandem::rollout
