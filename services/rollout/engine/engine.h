// The rollout engine: samples responses from a senior and a junior that share one sequence. One
// engine thread owns the models; every method here is thread-safe, and none blocks unless it says
// so.
//
// A server of several ranks has an engine on each. Rank 0's is called; the others compute what it
// announces.
#ifndef TANDEM_SERVICES_ROLLOUT_ENGINE_ENGINE_H_
#define TANDEM_SERVICES_ROLLOUT_ENGINE_ENGINE_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/base/call_scope.h"
#include "common/tensor/weight_transfer.h"
#include "services/rollout/engine/types.h"

namespace tandem::rollout {

class Engine {
 public:
  virtual ~Engine() = default;

  virtual EngineInfo Info() const = 0;

  // Checks a request without queueing it: INVALID_ARGUMENT with the path of the field
  // ("sampling.top_p", "prompt_token_ids[3]"), OUT_OF_RANGE for too long, FAILED_PRECONDITION for
  // tandem without a junior.
  virtual absl::Status Validate(const PromptRequest& request) const = 0;

  // Queues prompts that are admitted together; the engine thread sees them all or none, so the same
  // batch on an idle engine is scheduled the same way. Every request must pass Validate.
  // RESOURCE_EXHAUSTED (with a retry hint) when the queue cannot take them; UNAVAILABLE after
  // Shutdown.
  virtual absl::StatusOr<std::vector<PromptId>> Submit(std::vector<Submission> batch) = 0;

  // Frees the prompt's sequences at the next step boundary; its listener gets OnFailed(CANCELLED).
  // Unknown or finished ids are ignored.
  virtual void Cancel(const std::vector<PromptId>& prompts) = 0;

  // Teacher-forced log-probabilities, computed in slices of one pass between generation steps, all
  // of the senior's under the same weights: a commit in between starts the senior's part again, and
  // ABORTED ends a request that was overtaken too often. `done` is called once, with CANCELLED or
  // DEADLINE_EXCEEDED when `call` ended first. An error returned here
  // (a field's, RESOURCE_EXHAUSTED with a retry hint when too many wait, UNAVAILABLE after
  // Shutdown) means that it never will be.
  virtual absl::Status Score(ScoreRequest request, const CallScope& call, ScoreDone done) = 0;

  // Stops at the next step boundary (blocks until then); returns the sequences that are held.
  // Scores go on.
  virtual absl::StatusOr<int64_t> Pause(const CallScope& call) = 0;
  virtual absl::Status Resume(const CallScope& call) = 0;

  virtual EngineStats Stats() const = 0;

  // UNAVAILABLE when work waits and nothing progresses.
  virtual absl::Status Health() const = 0;

  // Weights of the senior.
  virtual WeightReceiver& weights() = 0;

  // Cancels everything and stops the engine thread. On a rank other than 0 it waits until rank 0
  // shuts down. The destructor calls it.
  virtual void Shutdown() = 0;
  // Whether rank 0 has shut down: this rank has nothing to do any more.
  virtual bool ended() const = 0;
};

// Joins the other ranks, loads the models (blocks) and starts the engine thread. Refuses a junior
// whose vocabulary differs, naming the first differing id; FAILED_PRECONDITION, naming the rank, if
// ranks have other configurations or model files; the errors of CheckRankLayout.
absl::StatusOr<std::unique_ptr<Engine>> CreateEngine(const EngineOptions& options);

}  // namespace tandem::rollout

#endif  // TANDEM_SERVICES_ROLLOUT_ENGINE_ENGINE_H_
