// The shape of a layer's entries in the KV cache. No torch.
#ifndef TANDEM_COMMON_MODEL_LAYER_CACHE_H_
#define TANDEM_COMMON_MODEL_LAYER_CACHE_H_

#include <cstdint>

namespace tandem {

// Tokens in a block of the cache: as many as the attention kernels take at a time, so that the bits
// of attention are those over contiguous keys.
inline constexpr int64_t kKvBlockTokens = 64;

// Returns the number of blocks that hold `tokens`.
inline int64_t KvBlocks(int64_t tokens) { return (tokens + kKvBlockTokens - 1) / kKvBlockTokens; }

// The shape [heads, head_dim] of a token's keys, and of its values.
struct LayerCache {
  int64_t heads = 0;
  int64_t head_dim = 0;
};

}  // namespace tandem

#endif  // TANDEM_COMMON_MODEL_LAYER_CACHE_H_
