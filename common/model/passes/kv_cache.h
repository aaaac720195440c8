// Keys and values of the sequences that one model is writing: one cache per model (lane). For a
// mixture of experts also the experts that the tokens took.
#ifndef TANDEM_COMMON_MODEL_PASSES_KV_CACHE_H_
#define TANDEM_COMMON_MODEL_PASSES_KV_CACHE_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "common/model/passes/layer_cache.h"

namespace tandem {

// Memory in blocks of kKvBlockTokens tokens. A sequence's block table lists the blocks of its
// positions, in order; sequences with a common prefix may share blocks. Which blocks are whose, and
// how far they are filled, is the caller's to know. Memory is reserved at construction and touched
// as it is used. Not thread-safe: it belongs to the engine's thread.
class KvCache {
 public:
  // `layers` is Model::CacheLayout of the model that writes it, `routing` its
  // ModelConfig::RoutingLayout, and `device` that of the model. `dtype` is float32 or bfloat16,
  // whatever the model computes in.
  KvCache(const std::vector<LayerCache>& layers, int64_t num_blocks, at::Device device = at::kCPU,
          at::ScalarType dtype = at::kFloat, const RoutingCache& routing = {});

  int64_t num_blocks() const { return num_blocks_; }

  // Copies a whole block, in all layers.
  void CopyBlock(int64_t from, int64_t to);

  // [num_blocks, heads, kKvBlockTokens, head_dim], of the layer's LayerCache. Values may be a view
  // of the keys' first columns.
  const at::Tensor& keys(int64_t layer) const { return keys_[layer]; }
  const at::Tensor& values(int64_t layer) const { return values_[layer]; }

  // [num_blocks * kKvBlockTokens, layers with experts, experts per token], of the RoutingCache:
  // what DecodeInput::records_routing recorded. Undefined without experts.
  const at::Tensor& routing() const { return routing_; }

 private:
  const int64_t num_blocks_;
  std::vector<at::Tensor> keys_;    // by layer
  std::vector<at::Tensor> values_;  // by layer
  at::Tensor routing_;
};

}  // namespace tandem

#endif  // TANDEM_COMMON_MODEL_PASSES_KV_CACHE_H_
