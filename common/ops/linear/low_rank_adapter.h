// Low-rank adapters of linear maps (LoRA, https://arxiv.org/abs/2106.09685): y = W x + scale B A x,
// where W does not change.
#ifndef TANDEM_COMMON_OPS_LINEAR_LOW_RANK_ADAPTER_H_
#define TANDEM_COMMON_OPS_LINEAR_LOW_RANK_ADAPTER_H_

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"

namespace tandem::ops {

class LinearWeight;

// The adapters of maps that are stacked in one LinearWeight. Adapters are never merged into the
// weights: merging and unmerging in a narrow type changes the weights.
struct LowRankAdapter {
  // A map with an adapter: its columns among those of the stack, and B [width, rank].
  struct Map {
    int64_t column, width;
    const LinearWeight* b;
  };

  const LinearWeight* a = nullptr;  // A of `maps`, stacked: [number of maps * rank, in]
  std::vector<Map> maps = {};       // by column
  int64_t rank = 0;
  double scale = 1;  // alpha / rank
};

// Returns, for each map, a part of its adapter.
std::vector<const LinearWeight*> OfAdapters(
    const std::vector<const LinearWeight*>& maps,
    absl::FunctionRef<const LinearWeight*(const LowRankAdapter&)> part);

// Adds the product of the adapter of each map, product(i) [T, width] of maps[i], to the columns of
// the map in y [T, sum of outs], which is overwritten and no leaf of autograd, and returns the sum.
at::Tensor AddAdapters(const at::Tensor& y, const LowRankAdapter& adapter,
                       absl::FunctionRef<at::Tensor(size_t map)> product);

// While one lives, linear maps on its thread compute without their adapters, as the model that was
// adapted does.
class WithoutAdapters {
 public:
  WithoutAdapters() : before_(std::exchange(active_, true)) {}
  ~WithoutAdapters() { active_ = before_; }
  WithoutAdapters(const WithoutAdapters&) = delete;
  WithoutAdapters& operator=(const WithoutAdapters&) = delete;

  static bool is_active() { return active_; }

 private:
  inline static thread_local bool active_ = false;
  const bool before_;
};

}  // namespace tandem::ops

#endif  // TANDEM_COMMON_OPS_LINEAR_LOW_RANK_ADAPTER_H_
