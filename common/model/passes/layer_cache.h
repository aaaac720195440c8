// A layer's entries in the KV cache: their shape, and which of them the layer reads. No torch.
#ifndef TANDEM_COMMON_MODEL_PASSES_LAYER_CACHE_H_
#define TANDEM_COMMON_MODEL_PASSES_LAYER_CACHE_H_

#include <algorithm>
#include <cstdint>
#include <vector>

#include "common/kernels/attention_window.h"

namespace tandem {

// Tokens in a block of the cache: as many as the attention kernels take at a time, so that the bits
// of attention are those over contiguous keys.
inline constexpr int64_t kKvBlockTokens = 64;

// Returns the number of blocks that hold `tokens`.
inline int64_t KvBlocks(int64_t tokens) { return (tokens + kKvBlockTokens - 1) / kKvBlockTokens; }

// The shape [heads, head_dim] of a token's keys, and of its values, and the window of them that a
// token's row reads.
struct LayerCache {
  int64_t heads = 0;
  int64_t head_dim = 0;
  int64_t window = kNoWindow;
  // If not 0, values take no memory of their own: they are the first `value_dim` columns of the
  // keys (latent attention).
  int64_t value_dim = 0;

  // Returns the numbers that the cache stores for a token.
  int64_t values_per_token() const { return heads * head_dim * (value_dim > 0 ? 1 : 2); }
};

// The shape of the experts that a token took, in the cache of a mixture of experts.
struct RoutingCache {
  int64_t layers = 0;  // with experts
  int64_t num_experts = 0;
  int64_t experts_per_token = 0;

  // Whether a byte holds an id.
  bool is_narrow() const { return num_experts <= 256; }
  int64_t ids_per_token() const { return layers * experts_per_token; }
  int64_t bytes_per_token() const { return ids_per_token() * (is_narrow() ? 1 : 2); }
};

// Returns the longest window of the layers: a row reads nothing before it.
inline int64_t LongestWindow(const std::vector<LayerCache>& layers) {
  int64_t longest = 0;
  for (const LayerCache& layer : layers) longest = std::max(longest, layer.window);
  return longest;
}

// Returns the most blocks of a cache that the keys of a window lie in.
inline int64_t WindowBlocks(int64_t window) { return WindowBlocks(window, kKvBlockTokens); }

}  // namespace tandem

#endif  // TANDEM_COMMON_MODEL_PASSES_LAYER_CACHE_H_
