// How many tokens a pass with drafts may have.
#ifndef TANDEM_SERVICES_ROLLOUT_ENGINE_DRAFTS_DRAFT_ROOM_H_
#define TANDEM_SERVICES_ROLLOUT_ENGINE_DRAFTS_DRAFT_ROOM_H_

#include <cstdint>

#include "common/tensor/dtype.h"
#include "services/rollout/engine/types.h"

namespace tandem::rollout {

// The most on a CPU, whose passes are soon bound by operations.
inline constexpr int64_t kHostTokensWithDrafts = kMaxSpeculativeTokens + 1;

// Returns the most tokens of a pass that takes about as long as one of a single token, because it
// reads the same weights; beyond them, drafts cost time that other sequences need. On a GPU a pass
// is bound by reading up to the rate of its products by its bandwidth: in bfloat16 156 tokens on an
// A100, 206 on an H200, 295 on an H100 and 403 on an L4, in float32 34 on an H100, by the makers'
// figures. But the host draws the rows of a pass with drafts, whose logits come to it: for 64 rows
// of 151,936 tokens 39 MB, 0.7 ms at the 55 GB/s of an H100.
inline int64_t MaxTokensWithDrafts(bool on_host, DType type) {
  if (on_host) return kHostTokensWithDrafts;
  return type == DType::kBFloat16 ? 64 : 32;
}

}  // namespace tandem::rollout

#endif  // TANDEM_SERVICES_ROLLOUT_ENGINE_DRAFTS_DRAFT_ROOM_H_
