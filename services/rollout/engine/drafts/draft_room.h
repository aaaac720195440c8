// How many tokens a pass with drafts may have.
#ifndef TANDEM_SERVICES_ROLLOUT_ENGINE_DRAFTS_DRAFT_ROOM_H_
#define TANDEM_SERVICES_ROLLOUT_ENGINE_DRAFTS_DRAFT_ROOM_H_

#include <algorithm>
#include <cstdint>

#include "common/tensor/dtype.h"
#include "services/rollout/engine/types.h"

namespace tandem::rollout {

// The most on a CPU: its passes end at their operations soon.
inline constexpr int64_t kHostTokensWithDrafts = kMaxSpeculativeTokens + 1;

// Returns the most tokens of a pass that takes about as long as one of a single token, because it
// reads the same weights; beyond them, drafts cost time that other sequences need. A GPU has so
// many operations for each number that it reads that they are free up to its products' rate by its
// bandwidth: in bfloat16 156 tokens on an A100, 206 on an H200, 295 on an H100 and 403 on an L4, in
// float32 34 on an H100, by the makers' figures. Products of fixed rows compute all of these rows
// anyway.
inline int64_t MaxTokensWithDrafts(bool on_host, DType type, int64_t product_rows) {
  if (on_host) return kHostTokensWithDrafts;
  return std::max<int64_t>(type == DType::kBFloat16 ? 128 : 32, product_rows);
}

}  // namespace tandem::rollout

#endif  // TANDEM_SERVICES_ROLLOUT_ENGINE_DRAFTS_DRAFT_ROOM_H_
