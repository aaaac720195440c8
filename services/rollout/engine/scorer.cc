#include "services/rollout/engine/scorer.h"

#include <algorithm>
#include <mutex>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/status_macros.h"
#include "common/tandem/tandem_sampler.h"
#include "services/rollout/engine/tell_listener.h"

namespace tandem::rollout {
namespace {

// A sequence that has a slot.
struct Scored {
  const ScoreSequence* sequence;
  std::vector<float>* logprobs;
  int64_t slot;
  int64_t cursor = 0;
  // No log-probability is asked for after the last token.
  int64_t target() const { return static_cast<int64_t>(sequence->token_ids.size()) - 1; }
};

}  // namespace

// The junior is computed first: new weights of the senior that arrive meanwhile cost nothing then.
struct Scorer::Job {
  ScoreRequest request;
  CallScope call;
  ScoreDone done;
  ScoreResult result;
  Author lane = Author::kSenior;  // the model whose log-probabilities are being computed
  size_t num_begun = 0;           // sequences of that model that have had a slot
  std::vector<Scored> group;      // the sequences that have a slot now
  int restarts = 0;
};

Scorer::Scorer(int64_t max_batched_tokens, const WeightsVersion& senior_weights,
               ModelRunner* senior, ModelRunner* junior)
    : max_batched_tokens_(max_batched_tokens),
      senior_weights_(senior_weights),
      runners_({senior, junior}) {}

Scorer::~Scorer() = default;

void Scorer::Submit(ScoreRequest request, const CallScope& call, ScoreDone done) {
  auto job = std::make_unique<Job>();
  job->lane = request.junior ? Author::kJunior : Author::kSenior;
  job->result.sequences.resize(request.sequences.size());
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

bool Scorer::Step() {
  if (jobs_.empty()) return false;
  Job& job = *jobs_.front();
  if (absl::Status status = RunPass(job); !status.ok()) {
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

absl::Status Scorer::FillGroup(Job& job) {
  const auto field = job.lane == Author::kSenior ? &SequenceScores::senior_logprobs
                                                 : &SequenceScores::junior_logprobs;
  while (static_cast<int64_t>(job.group.size()) < kScoreSlots &&
         job.num_begun < job.request.sequences.size()) {
    TANDEM_ASSIGN_OR_RETURN(const int64_t slot, runner(job.lane).AllocateSlot());
    const ScoreSequence& sequence = job.request.sequences[job.num_begun];
    std::vector<float>& logprobs = job.result.sequences[job.num_begun].*field;
    logprobs.resize(sequence.token_ids.size() - sequence.first_scored_token);
    job.group.push_back({.sequence = &sequence, .logprobs = &logprobs, .slot = slot});
    ++job.num_begun;
  }
  return absl::OkStatus();
}

void Scorer::FreeGroup(Job& job) {
  for (const Scored& scored : job.group) runner(job.lane).FreeSlot(scored.slot);
  job.group.clear();
}

absl::Status Scorer::RunPass(Job& job) {
  if (job.group.empty()) TANDEM_RETURN_IF_ERROR(FillGroup(job));
  std::vector<RunnerInput> inputs;
  std::vector<Scored*> owners;
  int64_t budget = max_batched_tokens_;
  for (Scored& scored : job.group) {
    const int64_t count = std::min(budget, scored.target() - scored.cursor);
    if (count <= 0) continue;
    const int64_t end = scored.cursor + count;
    // Row p gives the log-prob of token p + 1.
    const int64_t first_row = std::max(scored.cursor, scored.sequence->first_scored_token - 1);
    inputs.push_back({.slot = scored.slot,
                      .tokens = std::span(scored.sequence->token_ids).subspan(scored.cursor, count),
                      .num_output_rows = std::max<int64_t>(0, end - first_row)});
    scored.cursor = end;
    budget -= count;
    owners.push_back(&scored);
  }
  std::mutex mutex;
  absl::Status failure;
  const double temperature = job.request.temperature;
  ++passes_total_;
  TANDEM_RETURN_IF_ERROR(runner(job.lane).Forward(
      inputs, [&](int64_t input, int64_t row, std::span<const float> logits) {
        thread_local TandemSampler sampler;
        const Scored& scored = *owners[input];
        const int64_t token = scored.cursor - inputs[input].num_output_rows + row + 1;
        const auto logprob =
            sampler.TokenLogProb(logits, temperature, scored.sequence->token_ids[token]);
        if (logprob.ok()) {
          (*scored.logprobs)[token - scored.sequence->first_scored_token] = *logprob;
        } else {
          std::lock_guard lock(mutex);
          failure = logprob.status();
        }
      }));
  TANDEM_RETURN_IF_ERROR(failure);
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
  senior_weights_ = weights;
  for (size_t i = jobs_.size(); i-- > 0;) {
    Job& job = *jobs_[i];
    if (job.lane != Author::kSenior || job.num_begun == 0) continue;
    FreeGroup(job);
    job.num_begun = 0;
    if (++job.restarts <= kMaxRestarts) continue;
    End(jobs_.begin() + i,
        WithReason(absl::AbortedError(absl::StrCat("the weights changed ", job.restarts,
                                                   " times while the sequences were scored")),
                   reason::kWeightsChanged));
  }
}

void Scorer::FailAll(const absl::Status& status) {
  while (!jobs_.empty()) {
    TellListener([&] { End(jobs_.begin(), status); });
  }
}

}  // namespace tandem::rollout
