// The rollout engine: samples responses from a senior and a junior that share one sequence. One
// engine thread owns the models. Methods are thread-safe, and do not block unless they say so.
//
// A multi-rank server has an engine on each rank. Rank 0's engine is called; the others execute the
// commands that it announces.
#ifndef TANDEM_SERVICES_ROLLOUT_ENGINE_ENGINE_H_
#define TANDEM_SERVICES_ROLLOUT_ENGINE_ENGINE_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/base/call_scope.h"
#include "common/weights/weight_transfer.h"
#include "services/rollout/engine/types.h"

namespace tandem::rollout {

class Engine {
 public:
  virtual ~Engine() = default;

  virtual EngineInfo Info() const = 0;

  // Checks a request without queueing it: INVALID_ARGUMENT with the path of the field
  // ("sampling.top_p", "prompt_token_ids[3]"), OUT_OF_RANGE for a prompt that is too long,
  // FAILED_PRECONDITION for tandem without a junior.
  virtual absl::Status Validate(const PromptRequest& request) const = 0;

  // Queues prompts that are admitted together: the engine thread sees all or none of them, so an
  // idle engine always schedules the same batch in the same way. Every request must pass Validate.
  // DEADLINE_EXCEEDED if a deadline has passed. RESOURCE_EXHAUSTED if the queue cannot take them,
  // with a retry hint: the time in which the queue, as fast as it drains now, has room for them
  // (queue_drain.h). UNAVAILABLE after Shutdown.
  virtual absl::StatusOr<std::vector<PromptId>> Submit(std::vector<Submission> batch) = 0;

  // Frees the prompt's sequences at the next step boundary; its listener gets OnFailed(CANCELLED).
  // Unknown or finished ids are ignored.
  virtual void Cancel(const std::vector<PromptId>& prompts) = 0;

  // Computes teacher-forced log-probabilities, one pass at a time between generation steps. All of
  // the senior's are under the same weights: a commit in between starts the senior's passes again,
  // and ABORTED ends a request that commits interrupted too often. Calls `done` once, with
  // CANCELLED or DEADLINE_EXCEEDED if `call` ends first. Never calls it after returning an error:
  // that of a field, RESOURCE_EXHAUSTED (with a retry hint) if too many requests wait, UNAVAILABLE
  // after Shutdown.
  virtual absl::Status Score(ScoreRequest request, const CallScope& call, ScoreDone done) = 0;

  // Stops generation at the next step boundary, blocks until then, and returns the number of held
  // sequences. Scores go on.
  virtual absl::StatusOr<int64_t> Pause(const CallScope& call) = 0;
  virtual absl::Status Resume(const CallScope& call) = 0;

  virtual EngineStats Stats() const = 0;

  // UNAVAILABLE if work waits and nothing progresses.
  virtual absl::Status Health() const = 0;

  // Returns the receiver of the senior's weights.
  virtual WeightReceiver& weights() = 0;

  // Cancels everything and stops the engine thread. On a rank other than 0 it waits until rank 0
  // shuts down. The destructor calls it.
  virtual void Shutdown() = 0;
  // Whether rank 0 has shut down, and this rank can stop.
  virtual bool ended() const = 0;
};

// Joins the other ranks, loads the models and starts the engine thread; blocks. Refuses a junior
// whose vocabulary differs, naming the first differing id. FAILED_PRECONDITION, naming the rank, if
// configurations or model files of ranks differ; errors of CheckRankLayout.
absl::StatusOr<std::unique_ptr<Engine>> CreateEngine(const EngineOptions& options);

}  // namespace tandem::rollout

#endif  // TANDEM_SERVICES_ROLLOUT_ENGINE_ENGINE_H_
