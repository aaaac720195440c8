// Drafts of one sequence: tokens that may come next, which a pass verifies all at once. No tensors.
//
// A draft is accepted if it equals the token that is drawn in its place, from the model's own
// logits. By the exact rule the draw depends on the position's own random number alone: so a
// response is the same, to the bit, whatever the drafts are; they only decide how many tokens a
// pass writes (docs/adr/0047). By rejection sampling the draw prefers the draft: the distribution
// of responses is the same, and their bits are not (docs/adr/0051).
#ifndef TANDEM_SERVICES_ROLLOUT_ENGINE_DRAFTS_DRAFTER_H_
#define TANDEM_SERVICES_ROLLOUT_ENGINE_DRAFTS_DRAFTER_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "services/rollout/engine/drafts/draft_length.h"
#include "services/rollout/engine/types.h"

namespace tandem::rollout {

// Proposes drafts for one sequence from its tokens.
class Drafter {
 public:
  virtual ~Drafter() = default;

  // Appends up to `most` drafts of the tokens that follow `tokens`, the prompt and the response so
  // far. The calls for a sequence get longer and longer token lists.
  virtual void Propose(std::span<const int32_t> tokens, int64_t most,
                       std::vector<int32_t>& drafts) = 0;
};

// Makes a drafter for a sequence; nullptr for the methods whose drafts come from a model, kJunior
// and kHeads.
using DrafterFactory = std::function<std::unique_ptr<Drafter>(const SpeculativeParams& params)>;

// The DrafterFactory of a server.
std::unique_ptr<Drafter> MakeDrafter(const SpeculativeParams& params);

// A draft that the junior drew, for rejection sampling.
struct SampledDraft {
  int32_t token;
  std::vector<float> distribution;  // that it was drawn from, after the cuts: [vocabulary]
};

// The drafts of a sequence, and the outcome of earlier ones.
struct DraftState {
  DraftState(const SpeculativeParams& params, std::unique_ptr<Drafter> drafter)
      : method(params.method), drafter(std::move(drafter)), length(params.num_speculative_tokens) {}

  const SpeculativeMethod method;
  const std::unique_ptr<Drafter> drafter;  // null: a model writes the drafts
  DraftLength length;
  std::vector<int32_t> tokens;  // drafts of the positions after the sequence's tokens
  // kJunior: the junior writes drafts until there are `wanted`, or until the list is closed,
  // because another author may write after the next draft.
  int64_t wanted = 0;
  bool closed = false;
  // kJunior with rejection sampling: all drafts behind the sequence's last token. Of those that
  // `tokens` lacks, which no pass consumes, the first is proposed all the same: to leave out drafts
  // because of what they are would change the distribution.
  std::vector<SampledDraft> sampled;
  std::vector<float> next_distribution;  // of the draft that a pass draws
  SampleDrafts outcome;
};

}  // namespace tandem::rollout

#endif  // TANDEM_SERVICES_ROLLOUT_ENGINE_DRAFTS_DRAFTER_H_
