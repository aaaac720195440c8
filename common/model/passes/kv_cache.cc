#include "common/model/passes/kv_cache.h"

#include <ATen/ATen.h>

namespace tandem {

KvCache::KvCache(const std::vector<LayerCache>& layers, int64_t num_blocks, at::Device device,
                 at::ScalarType dtype, const RoutingCache& routing)
    : num_blocks_(num_blocks) {
  for (const LayerCache& layer : layers) {
    const auto blocks = [&] {
      return at::empty({num_blocks, layer.heads, kKvBlockTokens, layer.head_dim},
                       at::device(device).dtype(dtype));
    };
    keys_.push_back(blocks());
    values_.push_back(layer.value_dim > 0 ? keys_.back().narrow(3, 0, layer.value_dim) : blocks());
  }
  if (routing.layers == 0) return;
  routing_ = at::empty({num_blocks * kKvBlockTokens, routing.layers, routing.experts_per_token},
                       at::device(device).dtype(routing.is_narrow() ? at::kByte : at::kShort));
}

void KvCache::CopyBlock(int64_t from, int64_t to) {
  for (auto* layers : {&keys_, &values_}) {
    for (const at::Tensor& blocks : *layers) blocks[to].copy_(blocks[from]);
  }
  if (!routing_.defined()) return;
  routing_.narrow(0, to * kKvBlockTokens, kKvBlockTokens)
      .copy_(routing_.narrow(0, from * kKvBlockTokens, kKvBlockTokens));
}

}  // namespace tandem
