#include "services/rollout/engine/scorer.h"

#include <algorithm>
#include <mutex>

#include "common/base/status_macros.h"
#include "common/tandem/tandem_sampler.h"

namespace tandem::rollout {
namespace {

struct Scored {
  const ScoreSequence* sequence;
  std::vector<float>* logprobs;
  int64_t slot;
  int64_t cursor = 0;
  // The last token predicts nothing that is asked for.
  int64_t target() const { return static_cast<int64_t>(sequence->token_ids.size()) - 1; }
};

absl::Status RunGroup(ModelRunner& runner, std::vector<Scored>& group, double temperature,
                      int64_t max_batched_tokens, const std::function<absl::Status()>& check) {
  for (;;) {
    std::vector<RunnerInput> inputs;
    std::vector<Scored*> owners;
    int64_t budget = max_batched_tokens;
    for (Scored& scored : group) {
      const int64_t count = std::min(budget, scored.target() - scored.cursor);
      if (count <= 0) continue;
      const int64_t end = scored.cursor + count;
      // Row p gives the log-prob of token p + 1.
      const int64_t first_row = std::max(scored.cursor, scored.sequence->first_scored_token - 1);
      inputs.push_back(
          {.slot = scored.slot,
           .tokens = std::span(scored.sequence->token_ids).subspan(scored.cursor, count),
           .num_output_rows = std::max<int64_t>(0, end - first_row)});
      scored.cursor = end;
      budget -= count;
      owners.push_back(&scored);
    }
    if (inputs.empty()) return absl::OkStatus();
    TANDEM_RETURN_IF_ERROR(check());
    std::mutex mutex;
    absl::Status failure;
    TANDEM_RETURN_IF_ERROR(
        runner.Forward(inputs, [&](int64_t input, int64_t row, std::span<const float> logits) {
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
  }
}

}  // namespace

absl::StatusOr<std::vector<std::vector<float>>> ScoreWith(
    ModelRunner& runner, std::span<const ScoreSequence> sequences, double temperature,
    int64_t max_batched_tokens, const std::function<absl::Status()>& check) {
  std::vector<std::vector<float>> result(sequences.size());
  for (size_t begin = 0; begin < sequences.size(); begin += kScoreSlots) {
    const size_t end = std::min(begin + kScoreSlots, sequences.size());
    std::vector<Scored> group;
    absl::Status status;
    for (size_t i = begin; i < end && status.ok(); ++i) {
      const absl::StatusOr<int64_t> slot = runner.AllocateSlot();
      status = slot.status();
      if (!slot.ok()) break;
      result[i].resize(sequences[i].token_ids.size() - sequences[i].first_scored_token);
      group.push_back({.sequence = &sequences[i], .logprobs = &result[i], .slot = *slot});
    }
    if (status.ok()) status = RunGroup(runner, group, temperature, max_batched_tokens, check);
    for (const Scored& scored : group) runner.FreeSlot(scored.slot);
    TANDEM_RETURN_IF_ERROR(status);
  }
  return result;
}

}  // namespace tandem::rollout
