#include "common/model/kv_cache.h"

#include <ATen/ATen.h>

#include "absl/strings/str_cat.h"

namespace tandem {

KvCache::KvCache(const std::vector<LayerCache>& layers, int64_t num_slots, int64_t max_model_len,
                 at::Device device, at::ScalarType dtype)
    : max_model_len_(max_model_len), cursors_(num_slots, 0), in_use_(num_slots, false) {
  for (const LayerCache& layer : layers) {
    for (auto* slabs : {&keys_, &values_}) {
      slabs->push_back(at::empty({num_slots, layer.heads, max_model_len, layer.head_dim},
                                 at::device(device).dtype(dtype)));
    }
  }
  for (int64_t slot = num_slots - 1; slot >= 0; --slot) free_.push_back(slot);
}

absl::StatusOr<int64_t> KvCache::Allocate() {
  if (free_.empty()) {
    return absl::ResourceExhaustedError(
        absl::StrCat("all ", num_slots(), " slots of the KV cache are in use"));
  }
  const int64_t slot = free_.back();
  free_.pop_back();
  in_use_[slot] = true;
  cursors_[slot] = 0;
  return slot;
}

void KvCache::Free(int64_t slot) {
  TORCH_CHECK(in_use_[slot], "KV slot ", slot, " is not in use");
  in_use_[slot] = false;
  cursors_[slot] = 0;
  free_.push_back(slot);
}

void KvCache::Truncate(int64_t slot, int64_t length) {
  TORCH_CHECK(length >= 0 && length <= cursors_[slot], "cannot truncate slot ", slot, " at ",
              cursors_[slot], " to ", length);
  cursors_[slot] = length;
}

void KvCache::CopyPrefix(int64_t from, int64_t to, int64_t length) {
  TORCH_CHECK(from != to && length >= 0 && length <= cursors_[from], "cannot copy ", length,
              " tokens of slot ", from, " to slot ", to);
  for (auto* slabs : {&keys_, &values_}) {
    for (const at::Tensor& slab : *slabs) {
      slab[to].narrow(1, 0, length).copy_(slab[from].narrow(1, 0, length));
    }
  }
  cursors_[to] = length;
}

void KvCache::Advance(int64_t slot, int64_t count) {
  TORCH_CHECK(cursors_[slot] + count <= max_model_len_, "KV slot ", slot, " is full");
  cursors_[slot] += count;
}

}  // namespace tandem
