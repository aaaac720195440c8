#include "common/ops/linear/linear_stack.h"

#include <ATen/ATen.h>

#include <cstddef>
#include <cstdint>

#include "common/ops/linear/low_rank_adapter.h"

namespace tandem::ops {
namespace {

// Returns the numbers from the beginning of a matrix to that of the next one.
int64_t Distance(const std::vector<const LinearWeight*>& maps) {
  const at::Tensor& first = maps[0]->compute_weight();
  if (maps.size() == 1) return first.numel();
  return maps[1]->compute_weight().storage_offset() - first.storage_offset();
}

bool AreEvenlySpaced(const std::vector<const LinearWeight*>& maps) {
  for (const LinearWeight* map : maps) {
    if (map->is_packed()) return false;
  }
  const at::Tensor& first = maps[0]->compute_weight();
  const int64_t distance = Distance(maps), aligned = 16 / first.element_size();
  if (distance < first.numel() || distance % aligned != 0) return false;
  if (first.storage_offset() % aligned != 0) return false;
  for (size_t i = 0; i < maps.size(); ++i) {
    const at::Tensor& matrix = maps[i]->compute_weight();
    if (!matrix.is_alias_of(first) || !matrix.is_contiguous() || matrix.sizes() != first.sizes() ||
        matrix.storage_offset() != first.storage_offset() + static_cast<int64_t>(i) * distance) {
      return false;
    }
  }
  return true;
}

}  // namespace

bool AreStacked(const std::vector<const LinearWeight*>& maps) {
  if (!AreEvenlySpaced(maps)) return false;
  const LowRankAdapter* const adapter = maps.front()->adapter();
  if (adapter == nullptr) return true;
  for (size_t i = 0; i < adapter->maps.size(); ++i) {
    if (!AreEvenlySpaced(
            OfAdapters(maps, [&](const LowRankAdapter& of) { return of.maps[i].b; }))) {
      return false;
    }
  }
  return AreEvenlySpaced(OfAdapters(maps, [](const LowRankAdapter& of) { return of.a; }));
}

at::Tensor StackOf(const std::vector<const LinearWeight*>& maps) {
  const at::Tensor& first = maps[0]->compute_weight();
  return first.as_strided({static_cast<int64_t>(maps.size()), first.size(0), first.size(1)},
                          {Distance(maps), first.size(1), 1});
}

}  // namespace tandem::ops
