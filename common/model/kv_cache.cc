#include "common/model/kv_cache.h"

#include <ATen/ATen.h>

namespace tandem {

KvCache::KvCache(const std::vector<LayerCache>& layers, int64_t num_blocks, at::Device device,
                 at::ScalarType dtype)
    : num_blocks_(num_blocks) {
  for (const LayerCache& layer : layers) {
    for (auto* blocks : {&keys_, &values_}) {
      blocks->push_back(at::empty({num_blocks, layer.heads, kKvBlockTokens, layer.head_dim},
                                  at::device(device).dtype(dtype)));
    }
  }
}

void KvCache::CopyBlock(int64_t from, int64_t to) {
  for (auto* layers : {&keys_, &values_}) {
    for (const at::Tensor& blocks : *layers) blocks[to].copy_(blocks[from]);
  }
}

}  // namespace tandem
