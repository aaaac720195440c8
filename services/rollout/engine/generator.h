// Generates responses: runs the scheduler's passes on the two models, draws tokens, fills
// trajectories and calls the listeners. Belongs to one thread.
#ifndef TANDEM_SERVICES_ROLLOUT_ENGINE_GENERATOR_H_
#define TANDEM_SERVICES_ROLLOUT_ENGINE_GENERATOR_H_

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "common/tandem/author_selector.h"
#include "common/tandem/vocabulary.h"
#include "services/rollout/engine/model_runner.h"
#include "services/rollout/engine/scheduler.h"
#include "services/rollout/engine/types.h"

namespace tandem::rollout {

struct GeneratorOptions {
  SchedulerLimits limits;
  int64_t max_model_len;
  std::vector<int32_t> eos_token_ids;
  WeightsVersion senior_weights;  // the version of tokens until the first update
  std::string junior_version;     // recorded in trajectories
};

class Generator {
 public:
  // The runners outlive the generator; `junior` may be null.
  Generator(const GeneratorOptions& options, const BoundarySets* boundaries, ModelRunner* senior,
            ModelRunner* junior);
  ~Generator();

  // Queues a prompt, which must be valid.
  void Submit(PromptId id, PromptRequest request, std::shared_ptr<PromptListener> listener);

  // Ends a prompt: frees its sequences and reports `status` to its listener. Unknown ids are
  // ignored.
  void Fail(PromptId id, const absl::Status& status);
  void FailAll(const absl::Status& status);
  // Fails with DEADLINE_EXCEEDED the prompts, queued or running, whose deadline is not after `now`.
  void ExpireDeadlines(absl::Time now);

  // Whether a prompt is queued or running.
  bool HasWork() const { return !scheduler_.idle(); }

  // Admits the sequences that fit, then runs one pass of each model over the sequences that wait
  // for it. A model's error fails the prompts of its pass alone. Returns false if no pass was
  // computed.
  bool Step();

  // Tells that the senior's weights were replaced: later tokens have the version `weights`.
  void OnSeniorUpdated(const WeightsVersion& weights, OnWeightUpdate policy);

  // Sets the counters of EngineStats that generation owns, and no others.
  void FillStats(EngineStats& stats) const;
  int64_t running() const { return static_cast<int64_t>(scheduler_.running().size()); }

 private:
  bool RunPass(Author lane);
  absl::Status PreparePass(Author lane, const std::vector<PassEntry>& entries);
  void AppendToken(Sequence& sequence, Author author, int32_t token, float logprob,
                   float log_keep_mass);
  void FinishIfComplete(Sequence* sequence);
  void Release(Sequence* sequence);

  ModelRunner& runner(Author lane) { return *runners_[LaneIndex(lane)]; }

  const GeneratorOptions options_;
  const BoundarySets* const boundaries_;
  std::array<ModelRunner*, 2> runners_;
  Scheduler scheduler_;
  std::map<PromptId, std::unique_ptr<Prompt>> prompts_;
  std::shared_ptr<const WeightsVersion> senior_weights_;
  EngineStats totals_;
};

}  // namespace tandem::rollout

#endif  // TANDEM_SERVICES_ROLLOUT_ENGINE_GENERATOR_H_
