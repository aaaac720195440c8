// Drafts of one sequence: tokens that may come next, which a pass verifies all at once. No tensors.
//
// A draft is accepted if it equals the token that is drawn in its place, from the model's own
// logits and with the position's own random number. So a response is the same, to the bit, whatever
// the drafts are; they only decide how many tokens a pass writes (docs/adr/0047).
#ifndef TANDEM_SERVICES_ROLLOUT_ENGINE_DRAFTER_H_
#define TANDEM_SERVICES_ROLLOUT_ENGINE_DRAFTER_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "services/rollout/engine/draft_length.h"
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
  DraftCounts counts;
};

}  // namespace tandem::rollout

#endif  // TANDEM_SERVICES_ROLLOUT_ENGINE_DRAFTER_H_
