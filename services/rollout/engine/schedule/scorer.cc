#include "services/rollout/engine/schedule/scorer.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/errors/error.h"
#include "common/base/errors/status_macros.h"
#include "common/base/steady_time.h"
#include "common/model/passes/layer_cache.h"
#include "services/rollout/engine/images/image_tokens.h"
#include "services/rollout/engine/schedule/notify_listener.h"

namespace tandem::rollout {
namespace {

// A sequence that has blocks.
struct Scored {
  const ScoreSequence* sequence;
  std::vector<float>* logprobs;
  TopTokens* top;
  std::shared_ptr<const PromptImages> images = nullptr;
  std::vector<ImageTokens> image_tokens = {};
  BlockTable table = {};
  int64_t cursor = 0;
  // No log-probability is asked for after the last token.
  int64_t target() const { return static_cast<int64_t>(sequence->token_ids.size()) - 1; }
  // The tokens before the first position whose row is wanted.
  std::span<const int32_t> unscored() const {
    return std::span(sequence->token_ids).first(sequence->first_scored_token - 1);
  }
};

// Whether the next block that both consume is the same, none of its tokens scored.
bool ShareNextBlock(const Scored& a, const Scored& b) {
  const auto end = static_cast<size_t>(a.cursor + kKvBlockTokens);
  const auto images = [&](const Scored& scored) {
    return IdentitiesAmong(scored.image_tokens, /*begin=*/0, static_cast<int64_t>(end));
  };
  return a.cursor == b.cursor && std::min(a.unscored().size(), b.unscored().size()) >= end &&
         std::ranges::equal(a.unscored().first(end), b.unscored().first(end)) &&
         images(a) == images(b);
}

}  // namespace

// The junior is computed first: new weights of the senior that arrive meanwhile cost nothing then.
struct Scorer::Job {
  ScoreRequest request;
  CallScope call;
  ScoreDone done;
  ScoreResult result;
  Author lane = Author::kSenior;  // the model whose log-probabilities are being computed
  SamplingParams sampling;        // its temperature alone counts
  size_t num_begun = 0;           // sequences of that model that have had blocks
  std::vector<Scored> group;      // the sequences that have blocks now
  int restarts = 0;
};

Scorer::Scorer(const ScorerOptions& options, const WeightsVersion& senior_weights,
               ModelRunner* senior, ModelRunner* junior)
    : max_batched_tokens_(options.max_batched_tokens),
      clock_(options.clock),
      request_limits_(options.request_limits),
      senior_weights_(senior_weights),
      runners_({senior, junior}),
      pools_{BlockPool(options.blocks[0]), BlockPool(options.blocks[1])} {}

Scorer::~Scorer() = default;

void Scorer::Submit(ScoreRequest request, const CallScope& call, ScoreDone done) {
  auto job = std::make_unique<Job>();
  job->lane = request.junior ? Author::kJunior : Author::kSenior;
  job->result.sequences.resize(request.sequences.size());
  job->sampling.temperature = request.temperature;
  job->request = std::move(request);
  job->call = call;
  job->done = std::move(done);
  jobs_.push_back(std::move(job));
}

void Scorer::DropAbandoned() {
  for (size_t i = jobs_.size(); i-- > 0;) {
    if (absl::Status gone = jobs_[i]->call.Check(); !gone.ok()) End(jobs_.begin() + i, gone);
  }
}

bool Scorer::Step(absl::Duration limit) {
  if (jobs_.empty()) return false;
  Job& job = *jobs_.front();
  if (absl::Status status = RunPass(job, limit); !status.ok()) {
    End(jobs_.begin(), status);
    return false;
  }
  if (!job.group.empty()) return true;
  if (job.num_begun < job.request.sequences.size()) {
    std::rotate(jobs_.begin(), jobs_.begin() + 1, jobs_.end());  // the next one's turn
  } else if (job.lane == Author::kJunior && job.request.senior) {
    job.lane = Author::kSenior;
    job.num_begun = 0;
  } else {
    End(jobs_.begin(), absl::OkStatus());
  }
  return true;
}

bool Scorer::AddToGroup(Job& job, const ScoreSequence& sequence, SequenceScores& scores) {
  BlockPool& blocks = pool(job.lane);
  const bool senior = job.lane == Author::kSenior;
  Scored scored = {.sequence = &sequence,
                   .logprobs = senior ? &scores.senior_logprobs : &scores.junior_logprobs,
                   .top = senior ? &scores.senior_top_tokens : &scores.junior_top_tokens};
  scored.logprobs->resize(sequence.token_ids.size() - sequence.first_scored_token);
  *scored.top = {.count = job.request.num_top_logprobs, .ids = {}, .logprobs = {}};
  scored.images =
      ImagesOf(sequence, job.request.blobs, LaneIndex(job.lane), request_limits_).value();
  if (scored.images != nullptr) scored.image_tokens = ImageTokensOf(*scored.images);
  scored.cursor = scored.table.TakeKnown(blocks, scored.unscored(), scored.image_tokens);
  const int64_t missing = KvBlocks(scored.target()) - scored.table.size();
  // A sequence that goes on like one of the group shares its blocks when they are computed.
  const bool waits = std::ranges::any_of(
      job.group, [&](const Scored& other) { return ShareNextBlock(scored, other); });
  if (waits || missing > blocks.num_idle()) {
    scored.table.Release(blocks);
    return false;
  }
  for (int64_t i = 0; i < missing; ++i) scored.table.Grow(blocks);
  job.group.push_back(std::move(scored));
  return true;
}

void Scorer::FillGroup(Job& job) {
  while (job.group.size() < kGroupSize && job.num_begun < job.request.sequences.size()) {
    const ScoreSequence& sequence = job.request.sequences[job.num_begun];
    if (!AddToGroup(job, sequence, job.result.sequences[job.num_begun])) return;
    ++job.num_begun;
  }
}

void Scorer::FreeGroup(Job& job) {
  for (Scored& scored : job.group) scored.table.Release(pool(job.lane));
  job.group.clear();
}

int64_t Scorer::PassTokens(Author lane, absl::Duration limit) const {
  if (limit == absl::InfiniteDuration()) return max_batched_tokens_;
  // The first pass measures.
  const double tokens = absl::ToDoubleSeconds(limit) * tokens_per_second_[LaneIndex(lane)];
  const auto most = static_cast<double>(max_batched_tokens_);
  return std::min(max_batched_tokens_,
                  std::max(kMinPassTokens, static_cast<int64_t>(std::min(tokens, most))));
}

absl::Status Scorer::RunPass(Job& job, absl::Duration limit) {
  if (job.group.empty()) FillGroup(job);
  std::vector<OutputRow> rows;
  std::vector<std::vector<int64_t>> output_rows;  // of each input
  std::vector<DecodeInput> inputs;
  std::vector<Scored*> owners;
  const int64_t most = PassTokens(job.lane, limit);
  int64_t budget = most;
  for (Scored& scored : job.group) {
    const int64_t count = std::min(budget, scored.target() - scored.cursor);
    if (count <= 0) continue;
    const int64_t end = scored.cursor + count;
    std::vector<int64_t>& own_rows = output_rows.emplace_back();
    // The row of a position gives the log-prob of the token after it.
    for (int64_t p = std::max<int64_t>(scored.cursor, scored.unscored().size()); p < end; ++p) {
      own_rows.push_back(p - scored.cursor);
      rows.push_back({.token = scored.sequence->token_ids[p + 1],
                      .sampling = &job.sampling,
                      .num_top = job.request.num_top_logprobs});
    }
    // The rows do not move with the vector that holds them.
    inputs.push_back({.blocks = scored.table.blocks(),
                      .start = scored.cursor,
                      .tokens = std::span(scored.sequence->token_ids).subspan(scored.cursor, count),
                      .output_rows = own_rows,
                      .images = scored.images.get()});
    budget -= count;
    owners.push_back(&scored);
  }
  ++passes_total_;
  PassResults results;
  const SteadyTime begin = clock_();
  TANDEM_RETURN_IF_ERROR(
      runner(job.lane).Run({.copies = {}, .sequences = inputs, .rows = rows}, results));
  const double seconds = absl::ToDoubleSeconds(clock_() - begin);
  if (seconds > 0) {
    tokens_per_second_[LaneIndex(job.lane)] = static_cast<double>(most - budget) / seconds;
  }
  size_t next = 0;
  for (size_t i = 0; i < owners.size(); ++i) {
    Scored& scored = *owners[i];
    for (const int64_t row : inputs[i].output_rows) {
      TANDEM_ASSIGN_OR_RETURN(const SampledToken token, results[next++]);
      (*scored.logprobs)[scored.cursor + row - scored.unscored().size()] = token.logprob;
      for (const LikelyToken& likely : token.top) {  // rows come in their order
        scored.top->ids.push_back(likely.token);
        scored.top->logprobs.push_back(likely.logprob);
      }
    }
    scored.cursor += static_cast<int64_t>(inputs[i].tokens.size());
    scored.table.Remember(pool(job.lane),
                          std::span(scored.sequence->token_ids).first(scored.cursor),
                          scored.image_tokens);
  }
  const bool finished = std::all_of(job.group.begin(), job.group.end(), [](const Scored& scored) {
    return scored.cursor == scored.target();
  });
  if (finished) FreeGroup(job);
  return absl::OkStatus();
}

void Scorer::End(std::deque<std::unique_ptr<Job>>::iterator position, const absl::Status& status) {
  const std::unique_ptr<Job> job = std::move(*position);
  jobs_.erase(position);
  FreeGroup(*job);
  if (!status.ok()) {
    job->done(status);
    return;
  }
  job->result.weights = senior_weights_;
  job->done(std::move(job->result));
}

void Scorer::OnSeniorUpdated(const WeightsVersion& weights) {
  const bool same = weights.digest == senior_weights_.digest;
  senior_weights_ = weights;
  if (same) return;
  pool(Author::kSenior).Forget();
  for (size_t i = jobs_.size(); i-- > 0;) {
    Job& job = *jobs_[i];
    if (job.lane != Author::kSenior || job.num_begun == 0) continue;
    FreeGroup(job);
    job.num_begun = 0;
    if (++job.restarts <= kMaxRestarts) continue;
    End(jobs_.begin() + i,
        WithReason(absl::AbortedError(absl::StrCat("the weights changed ", job.restarts,
                                                   " times while the sequences were being scored")),
                   reason::kWeightsChanged));
  }
}

void Scorer::FailAll(const absl::Status& status) {
  while (!jobs_.empty()) {
    NotifyListener([&] { End(jobs_.begin(), status); });
  }
}

}  // namespace tandem::rollout
