// Drafts from the sequence itself ("prompt lookup decoding", Saxena 2023).
#ifndef TANDEM_SERVICES_ROLLOUT_ENGINE_DRAFTS_NGRAM_DRAFTER_H_
#define TANDEM_SERVICES_ROLLOUT_ENGINE_DRAFTS_NGRAM_DRAFTER_H_

#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "services/rollout/engine/drafts/drafter.h"

namespace tandem::rollout {

// Finds the longest suffix of the tokens, of `shortest` to `longest` tokens, that occurs earlier,
// and proposes what followed its last earlier occurrence. Text that repeats with a short period is
// continued with that period. Each token of the sequence is indexed once, in `longest` steps.
class NgramDrafter final : public Drafter {
 public:
  NgramDrafter(int64_t shortest, int64_t longest) : shortest_(shortest), longest_(longest) {}

  void Propose(std::span<const int32_t> tokens, int64_t most,
               std::vector<int32_t>& drafts) override;

 private:
  const int64_t shortest_;
  const int64_t longest_;
  // The end of the last n-gram with this hash. Equal hashes of different n-grams cost a wrong
  // draft, and no more.
  std::unordered_map<uint64_t, int64_t> ends_;
  int64_t indexed_ = 0;  // n-grams that end at or before this position are in ends_
};

}  // namespace tandem::rollout

#endif  // TANDEM_SERVICES_ROLLOUT_ENGINE_DRAFTS_NGRAM_DRAFTER_H_
