// Keys and values of the sequences that one model is writing: one cache per model (lane).
#ifndef TANDEM_COMMON_MODEL_KV_CACHE_H_
#define TANDEM_COMMON_MODEL_KV_CACHE_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/model/layer_cache.h"

namespace tandem {

// A slot holds one sequence of up to `max_model_len` tokens; per layer its keys are contiguous.
// The cursor of a slot is the number of tokens the model has consumed. Memory is reserved at
// construction and touched as it is used. Not thread-safe: it belongs to the engine's thread.
class KvCache {
 public:
  // `layers` is Model::CacheLayout of the model that writes it; `device` and `dtype` are the
  // model's.
  KvCache(const std::vector<LayerCache>& layers, int64_t num_slots, int64_t max_model_len,
          at::Device device = at::kCPU, at::ScalarType dtype = at::kFloat);

  // A free slot with cursor 0; RESOURCE_EXHAUSTED when all are taken.
  absl::StatusOr<int64_t> Allocate();
  void Free(int64_t slot);

  int64_t num_slots() const { return static_cast<int64_t>(cursors_.size()); }
  int64_t max_model_len() const { return max_model_len_; }

  int64_t cursor(int64_t slot) const { return cursors_[slot]; }
  bool in_use(int64_t slot) const { return in_use_[slot]; }

  // Forgets the tokens from `length` on. `length` is at most the cursor.
  void Truncate(int64_t slot, int64_t length);
  // Copies the first `length` tokens of slot `from` to slot `to` and sets that cursor: samples of
  // one prompt share its prefill.
  void CopyPrefix(int64_t from, int64_t to, int64_t length);
  // Moves the cursor on by `count` consumed tokens. Called by Model::Decode.
  void Advance(int64_t slot, int64_t count);

  // [num_slots, heads, max_model_len, head_dim], of the layer's LayerCache.
  const at::Tensor& keys(int64_t layer) const { return keys_[layer]; }
  const at::Tensor& values(int64_t layer) const { return values_[layer]; }

 private:
  int64_t max_model_len_;
  std::vector<at::Tensor> keys_;    // by layer
  std::vector<at::Tensor> values_;  // by layer
  std::vector<int64_t> cursors_;
  std::vector<bool> in_use_;
  std::vector<int64_t> free_;  // the next one is at the back
};

}  // namespace tandem

#endif  // TANDEM_COMMON_MODEL_KV_CACHE_H_
