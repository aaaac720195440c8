// Computes teacher-forced log-probabilities, one pass at a time, through the runners of generation,
// and so with the same bits on the CPU's own kernels. (Products of ATen may round otherwise in a
// pass of other tokens.) Belongs to the engine thread.
#ifndef TANDEM_SERVICES_ROLLOUT_ENGINE_SCHEDULE_SCORER_H_
#define TANDEM_SERVICES_ROLLOUT_ENGINE_SCHEDULE_SCORER_H_

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "common/base/call_scope.h"
#include "common/base/steady_time.h"
#include "common/weights/weights_version.h"
#include "services/rollout/engine/blocks/block_table.h"
#include "services/rollout/engine/models/model_runner.h"
#include "services/rollout/engine/schedule/request_check.h"
#include "services/rollout/engine/schedule/sequence.h"
#include "services/rollout/engine/types.h"

namespace tandem::rollout {

struct ScorerOptions {
  int64_t max_batched_tokens;
  // The blocks of each lane's cache that the scorer uses, and the generator does not; enough for
  // the longest sequence.
  std::array<BlockRange, 2> blocks;
  RequestLimits request_limits;
  std::function<SteadyTime()> clock = SteadyTime::Now;
};

class Scorer {
 public:
  // Number of times that new weights may start a request's senior passes again before it is
  // ABORTED.
  static constexpr int kMaxRestarts = 8;
  // Sequences that are scored at the same time, at most.
  static constexpr size_t kGroupSize = 8;
  // Tokens of a pass, at least, however short it should be: fewer take about as long, because a
  // pass reads all weights.
  static constexpr int64_t kMinPassTokens = 16;

  // The runners outlive the scorer; `junior` may be null.
  Scorer(const ScorerOptions& options, const WeightsVersion& senior_weights, ModelRunner* senior,
         ModelRunner* junior);
  ~Scorer();

  // Queues a request, which must be valid.
  void Submit(ScoreRequest request, const CallScope& call, ScoreDone done);

  bool HasWork() const { return !jobs_.empty(); }

  // Ends the jobs whose calls are over.
  void DropAbandoned();

  // Runs one pass of at most max_batched_tokens for the job whose turn it is; a turn is the passes
  // of one group of sequences. The pass is so small that it should end within `limit`, by the speed
  // of the model's last pass. Tokens before the first scored one are shared with sequences that
  // were scored before, as far as the cache contains them. Returns false if nothing progressed.
  bool Step(absl::Duration limit = absl::InfiniteDuration());

  // Tells that the senior's weights were replaced: its unfinished passes start again.
  void OnSeniorUpdated(const WeightsVersion& weights);

  void FailAll(const absl::Status& status);

  int64_t passes_total() const { return passes_total_; }
  int64_t num_held_blocks(Author lane) const { return pools_[LaneIndex(lane)].num_held(); }

 private:
  struct Job;

  // Returns how many tokens a pass of `lane` may consume to end within `limit`.
  int64_t PassTokens(Author lane, absl::Duration limit) const;
  absl::Status RunPass(Job& job, absl::Duration limit);
  void FillGroup(Job& job);
  // Gives `sequence` blocks, shared or its own, as the next of the job's group. Returns false if it
  // has to wait for the next group.
  bool AddToGroup(Job& job, const ScoreSequence& sequence, SequenceScores& scores);
  void FreeGroup(Job& job);
  // Removes the job at `position` from the queue and calls its `done`.
  void End(std::deque<std::unique_ptr<Job>>::iterator position, const absl::Status& status);

  ModelRunner& runner(Author lane) { return *runners_[LaneIndex(lane)]; }
  BlockPool& pool(Author lane) { return pools_[LaneIndex(lane)]; }

  const int64_t max_batched_tokens_;
  const std::function<SteadyTime()> clock_;
  const RequestLimits request_limits_;
  std::array<double, 2> tokens_per_second_ = {0, 0};  // of each lane's last pass; 0: none yet
  WeightsVersion senior_weights_;
  const std::array<ModelRunner*, 2> runners_;
  std::array<BlockPool, 2> pools_;
  std::deque<std::unique_ptr<Job>> jobs_;  // the front job has the turn, and alone holds blocks
  int64_t passes_total_ = 0;
};

}  // namespace tandem::rollout

#endif  // TANDEM_SERVICES_ROLLOUT_ENGINE_SCHEDULE_SCORER_H_
