// The shape of a layer's entries in the KV cache. No torch.
#ifndef TANDEM_COMMON_MODEL_LAYER_CACHE_H_
#define TANDEM_COMMON_MODEL_LAYER_CACHE_H_

#include <cstdint>

namespace tandem {

// The shape [heads, head_dim] of a token's keys, and of its values.
struct LayerCache {
  int64_t heads = 0;
  int64_t head_dim = 0;
};

}  // namespace tandem

#endif  // TANDEM_COMMON_MODEL_LAYER_CACHE_H_
