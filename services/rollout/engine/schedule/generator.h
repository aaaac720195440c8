// Generates responses: runs the scheduler's passes on the two models, draws tokens, fills
// trajectories and calls the listeners. Belongs to one thread.
#ifndef TANDEM_SERVICES_ROLLOUT_ENGINE_SCHEDULE_GENERATOR_H_
#define TANDEM_SERVICES_ROLLOUT_ENGINE_SCHEDULE_GENERATOR_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/base/steady_time.h"
#include "common/coauthoring/author_selector.h"
#include "common/coauthoring/vocabulary.h"
#include "services/rollout/engine/drafts/drafter.h"
#include "services/rollout/engine/models/model_runner.h"
#include "services/rollout/engine/schedule/request_check.h"
#include "services/rollout/engine/schedule/scheduler.h"
#include "services/rollout/engine/types.h"

namespace tandem::rollout {

struct GeneratorOptions {
  SchedulerLimits limits;
  RequestLimits request_limits;
  std::vector<int32_t> eos_token_ids;
  // Outlives the generator; finds stop texts, which no prompt has where this is null.
  const Vocabulary* vocabulary = nullptr;
  WeightsVersion senior_weights;  // the version of tokens until the first update
  std::string junior_version;     // recorded in trajectories
  // Both models consume every token as soon as it is written, as if neither could lag. Slower, and
  // with the same results: for comparison.
  bool eager_lanes = false;
  DrafterFactory make_drafter = MakeDrafter;
};

class Generator {
 public:
  // The runners outlive the generator; `junior` may be null.
  Generator(const GeneratorOptions& options, const BoundarySets* boundaries, ModelRunner* senior,
            ModelRunner* junior);
  ~Generator();

  // Queues a prompt, which must be valid.
  void Submit(PromptId id, Submission submission);

  // Ends a prompt: frees its sequences and reports `status` to its listener. Unknown ids are
  // ignored.
  void Fail(PromptId id, const absl::Status& status);
  void FailAll(const absl::Status& status);
  // Fails with DEADLINE_EXCEEDED the prompts, queued or running, whose deadline is not after `now`.
  void ExpireDeadlines(SteadyTime now);
  // The earliest deadline of a prompt; InfiniteFuture if none has one.
  SteadyTime next_deadline() const {
    return deadlines_.empty() ? SteadyTime::InfiniteFuture() : deadlines_.begin()->first;
  }

  // Whether a prompt is queued or running.
  bool HasWork() const { return !scheduler_.idle(); }

  // Admits the sequences that fit, then runs one pass of the model whose turn it is (eager: of
  // both) over the sequences that wait for it. Where that model runs behind the host, another pass
  // is planned and started meanwhile: the next one of the same sequences, which still runs when the
  // step returns, or else one of the other model over other sequences. A model's error fails the
  // prompts of its pass alone. Returns false if no pass was computed.
  bool Step();

  // Ends the pass that still runs. Needed before anybody else uses the runners or changes weights.
  void Settle();

  // Tells that the senior's weights were replaced: later tokens have the version `weights`.
  void OnSeniorUpdated(const WeightsVersion& weights, OnWeightUpdate policy);

  // Sets the counters of EngineStats that generation owns, and no others.
  void FillStats(EngineStats& stats) const;
  int64_t running() const { return static_cast<int64_t>(scheduler_.running().size()); }

 private:
  // A pass of a lane, from its start to its end.
  struct LanePass {
    const PassPlan* plan = nullptr;
    absl::Status status;
    std::vector<OutputRow> rows;
    std::vector<int64_t> row_indices;  // of each of the rows: DecodeInput::output_rows
    std::vector<size_t> row_ends;      // per entry, in rows
    // The tokens that entries consume beyond those of their sequences: drafts behind those, or the
    // row of the pass before that draws the token.
    std::vector<int32_t> unconfirmed;
    std::vector<DecodeInput> inputs;
    PassResults results;
  };
  // The passes of a lane that have started and not ended, two at most.
  struct LanePasses {
    std::array<LanePass, 2> memory;  // kept so that the vectors' is
    size_t oldest = 0, count = 0;

    LanePass& Add() { return memory[(oldest + count++) % 2]; }
    LanePass& TakeOldest() {
      --count;
      return memory[std::exchange(oldest, 1 - oldest)];
    }
  };
  using Failures = std::map<PromptId, absl::Status>;

  LanePasses& passes(Author lane) { return passes_[LaneIndex(lane)]; }
  // Plans a pass of the lane and starts its model. Returns false if there is nothing to compute.
  bool Start(Author lane);
  // Does so behind the lane's pass that runs, before its tokens are known (Scheduler::PlanAhead).
  bool StartAhead(Author lane);
  // Waits for the lane's oldest pass and takes its results, but those of prompts that have failed
  // and of sequences that have ended. Adds the prompts that fail, which live until the passes with
  // them have ended. Returns whether the pass was computed.
  bool End(Author lane, Failures& failures);
  // Ends the pass that was started ahead if prompts failed, which it may have, and removes them.
  void RemoveFailed(Failures& failures);
  // Ends a prompt of no pass that runs.
  void Remove(PromptId id, const absl::Status& status);
  // Starts the lane's model.
  void Begin(Author lane, const PassPlan& plan);
  // Adds to the row of `position`, from which a token is drawn, the draft of that token.
  static void ProposeDraft(const PassEntry& entry, int64_t position, OutputRow& row);
  // Returns the tokens that an entry consumes.
  static std::span<const int32_t> TokensOf(const PassEntry& entry,
                                           std::vector<int32_t>& unconfirmed);
  // Adds the rows that are wanted of an entry to those of a pass of the lane.
  static void AskForRows(Author lane, const PassEntry& entry, LanePass& of);
  // Adds the results of an entry, from number `first` of the pass on, to its sequence, or returns
  // the error of the first row that has one. Rows after a rejected draft count for nothing.
  absl::Status TakeRows(Author lane, const PassEntry& entry, const DecodeInput& input,
                        const PassResults& results, size_t first);
  // Appends the tokens that were drawn from the entry's last rows, up to the first that differs
  // from the draft in its place, or ends the response. Returns the number of rejected drafts.
  absl::StatusOr<int64_t> TakeDraws(Author lane, const PassEntry& entry,
                                    std::span<const absl::StatusOr<SampledToken>> draws);
  // Adds a token that the junior drew to the drafts.
  static void TakeDraft(Sequence& sequence, const absl::StatusOr<SampledToken>& drawn);
  void CountDrafts(DraftState& drafts, int64_t drafted, int64_t accepted);
  // Notes that heads draft behind `row` of the pass, from which the sequence's last token was
  // drawn, if the sequence has such heads and a use for drafts.
  void AskHeads(Sequence& sequence, int64_t row);
  // Has the senior's heads draft for all that were noted.
  absl::Status DraftWithHeads();
  void AppendToken(Sequence& sequence, Author author, const SampledToken& sampled);
  // Reads the begun turn of a response that is continued, for stop texts.
  void ReadTurn(Sequence& sequence) const;
  // Whether the turn, with its next token, contains a stop text.
  bool CompletesStopText(Sequence& sequence, int32_t token) const;
  // Tells the listener of the response's tokens from number `first` on.
  void StreamTokens(const Sequence& sequence, int64_t first);
  // Ends a sequence to which nothing is missing. Returns the error with which its prompt fails.
  absl::Status FinishIfComplete(Sequence* sequence);
  // Removes a prompt from the tables and returns it; nullptr if there is none.
  std::unique_ptr<Prompt> TakeOut(PromptId id);

  // A sequence for which heads draft, and how many tokens it can use.
  struct HeadDrafts {
    Sequence* sequence;
    int64_t count;
  };

  ModelRunner& runner(Author lane) { return *runners_[LaneIndex(lane)]; }

  const GeneratorOptions options_;
  const BoundarySets* const boundaries_;
  std::array<ModelRunner*, 2> runners_;
  Scheduler scheduler_;
  std::map<PromptId, std::unique_ptr<Prompt>> prompts_;
  std::set<std::pair<SteadyTime, PromptId>> deadlines_;  // of the prompts that have one
  std::shared_ptr<const WeightsVersion> senior_weights_;
  EngineStats totals_;
  std::array<LanePasses, 2> passes_;
  std::optional<Author> ahead_;  // the lane of the pass that runs when a step has returned
  // The drafts that the pass that ends asks for; kept so that their memory is.
  std::vector<HeadDrafts> head_drafts_;
  std::vector<DraftRequest> draft_requests_;  // of each of head_drafts_
  std::vector<int32_t> proposed_;
};

}  // namespace tandem::rollout

#endif  // TANDEM_SERVICES_ROLLOUT_ENGINE_SCHEDULE_GENERATOR_H_
