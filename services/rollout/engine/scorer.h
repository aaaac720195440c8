// Computes teacher-forced log-probabilities, one pass at a time, through the runners of generation,
// and so with the same bits. Belongs to the engine thread.
#ifndef TANDEM_SERVICES_ROLLOUT_ENGINE_SCORER_H_
#define TANDEM_SERVICES_ROLLOUT_ENGINE_SCORER_H_

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "common/base/call_scope.h"
#include "common/base/weights_version.h"
#include "services/rollout/engine/model_runner.h"
#include "services/rollout/engine/sequence.h"
#include "services/rollout/engine/types.h"

namespace tandem::rollout {

// Sequences that are scored at the same time. A runner has as many slots beyond the generator's.
inline constexpr int64_t kScoreSlots = 8;

class Scorer {
 public:
  // Number of times that new weights may start a request's senior passes again before it is
  // ABORTED.
  static constexpr int kMaxRestarts = 8;

  // The runners outlive the scorer; `junior` may be null.
  Scorer(int64_t max_batched_tokens, const WeightsVersion& senior_weights, ModelRunner* senior,
         ModelRunner* junior);
  ~Scorer();

  // Queues a request, which must be valid.
  void Submit(ScoreRequest request, const CallScope& call, ScoreDone done);

  bool HasWork() const { return !jobs_.empty(); }

  // Ends the jobs whose calls are over.
  void DropAbandoned();

  // Runs one pass of at most max_batched_tokens for the job whose turn it is; a turn is the passes
  // of kScoreSlots sequences. Returns false if nothing progressed.
  bool Step();

  // Tells that the senior's weights were replaced: its unfinished passes start again.
  void OnSeniorUpdated(const WeightsVersion& weights);

  void FailAll(const absl::Status& status);

  int64_t passes_total() const { return passes_total_; }

 private:
  struct Job;

  absl::Status RunPass(Job& job);
  absl::Status FillGroup(Job& job);
  void FreeGroup(Job& job);
  // Removes the job at `position` from the queue and calls its `done`.
  void End(std::deque<std::unique_ptr<Job>>::iterator position, const absl::Status& status);

  ModelRunner& runner(Author lane) { return *runners_[LaneIndex(lane)]; }

  const int64_t max_batched_tokens_;
  WeightsVersion senior_weights_;
  const std::array<ModelRunner*, 2> runners_;
  std::deque<std::unique_ptr<Job>> jobs_;  // the front job has the turn, and alone holds slots
  int64_t passes_total_ = 0;
};

}  // namespace tandem::rollout

#endif  // TANDEM_SERVICES_ROLLOUT_ENGINE_SCORER_H_
