#include "common/ops/threads/pass_memory.h"

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <utility>

namespace tandem::ops {
namespace {

thread_local PassMemory* current = nullptr;

// Whether nobody but the slot holds `tensor`.
bool Unshared(const at::Tensor& tensor) { return tensor.use_count() == 1; }

}  // namespace

bool PassMemory::Slot::idle() const {
  // Views that others made hold the storage.
  return Unshared(tensor) && tensor.storage().use_count() == 1 + views.size() &&
         std::ranges::all_of(views, Unshared);
}

at::Tensor PassMemory::Empty(at::IntArrayRef sizes, at::ScalarType type) {
  const auto item = static_cast<int64_t>(c10::elementSize(type));
  const int64_t bytes = c10::multiply_integers(sizes) * item;
  // The smallest that is large enough, else the largest.
  auto best = slots_.end();
  for (auto slot = slots_.begin(); slot != slots_.end(); ++slot) {
    if (slot->tensor.scalar_type() != type || !slot->idle()) continue;
    if (best == slots_.end() ||
        (best->bytes < bytes ? slot->bytes > best->bytes
                             : bytes <= slot->bytes && slot->bytes < best->bytes)) {
      best = slot;
    }
  }
  if (best == slots_.end() || best->bytes < bytes) {
    if (best != slots_.end()) {
      kept_bytes_ -= best->bytes;
      slots_.erase(best);
    }
    if (kept_bytes_ + bytes > kMaxBytes) {
      DropIdle();
      return at::empty(sizes, type);
    }
    slots_.push_back({.tensor = at::empty({bytes / item}, type), .views = {}, .bytes = bytes});
    kept_bytes_ += bytes;
    best = std::prev(slots_.end());
  }
  best->tensor.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return best->tensor;
}

void PassMemory::DropIdle() {
  std::erase_if(slots_, [](const Slot& slot) { return slot.idle(); });
  kept_bytes_ = 0;
  for (const Slot& slot : slots_) kept_bytes_ += slot.bytes;
}

at::Tensor PassMemory::View(const at::Tensor& x, at::IntArrayRef sizes, at::IntArrayRef strides,
                            int64_t offset) {
  for (Slot& slot : slots_) {
    if (!slot.tensor.is_alias_of(x)) continue;
    for (at::Tensor& view : slot.views) {
      if (!Unshared(view)) continue;
      view.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
      return view;
    }
    return slot.views.emplace_back(slot.tensor.as_strided(sizes, strides, offset));
  }
  return x.as_strided(sizes, strides, offset);
}

PassMemoryScope::PassMemoryScope(PassMemory& memory) : outer_(current) {
  TORCH_CHECK(c10::InferenceMode::is_enabled(), "tensors are reused only in inference mode");
  current = &memory;
}

PassMemoryScope::~PassMemoryScope() { current = outer_; }

at::Tensor EmptyOnCpu(at::IntArrayRef sizes, at::ScalarType type) {
  return current != nullptr ? current->Empty(sizes, type) : at::empty(sizes, type);
}

at::Tensor Narrow(const at::Tensor& x, int64_t dim, int64_t start, int64_t length) {
  if (current == nullptr || x.dim() > 3) return x.narrow(dim, start, length);
  std::array<int64_t, 3> sizes = {};
  std::ranges::copy(x.sizes(), sizes.begin());
  sizes[dim] = length;
  return current->View(x, {sizes.data(), static_cast<size_t>(x.dim())}, x.strides(),
                       x.storage_offset() + start * x.stride(dim));
}

std::array<at::Tensor, 3> SplitColumns(const at::Tensor& x, const std::array<int64_t, 3>& widths) {
  std::array<at::Tensor, 3> columns;
  if (current == nullptr) {
    std::ranges::move(x.split_with_sizes(widths, 1), columns.begin());
    return columns;
  }
  int64_t begin = 0;
  for (size_t i = 0; i < widths.size(); ++i) {
    columns[i] = Narrow(x, 1, begin, widths[i]);
    begin += widths[i];
  }
  return columns;
}

at::Tensor SplitHeads(const at::Tensor& x, int64_t head_dim) {
  const int64_t heads = x.size(1) / head_dim;
  if (current == nullptr) return x.unflatten(1, {heads, head_dim});
  return current->View(x, {x.size(0), heads, head_dim},
                       {x.stride(0), head_dim * x.stride(1), x.stride(1)}, x.storage_offset());
}

}  // namespace tandem::ops
