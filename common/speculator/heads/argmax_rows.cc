#include "common/speculator/heads/argmax_rows.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cstdint>
#include <tuple>

#include "absl/functional/function_ref.h"
#include "common/ops/ops.h"

namespace tandem::speculator {
namespace {

// Logits of a tile, and the fewest columns of one that is not the last. Few rows, as in drafting,
// have a single tile, which takes few kernel launches on a GPU.
constexpr int64_t kTileLogits = int64_t{1} << 22, kMinTileColumns = 8192;

at::Tensor ArgmaxOfChunk(const at::Tensor& x, const at::Tensor& weight) {
  const int64_t vocabulary = weight.size(0);
  const int64_t columns = std::max(kMinTileColumns, kTileLogits / x.size(0));
  at::Tensor best, best_index;
  for (int64_t begin = 0; begin < vocabulary; begin += columns) {
    const at::Tensor tile = weight.narrow(0, begin, std::min(columns, vocabulary - begin));
    // Both give the first of equal entries.
    auto [greatest, index] = ops::Linear(x, tile).max(/*dim=*/1);
    if (begin == 0) {
      std::tie(best, best_index) = std::make_tuple(greatest, index);
    } else {
      const at::Tensor better = greatest > best;
      best = at::where(better, greatest, best);
      best_index = at::where(better, index + begin, best_index);
    }
  }
  return best_index;
}

// Calls `argmax` for up to `chunk_rows` rows of x at a time; returns all its results.
at::Tensor InChunks(const at::Tensor& x, int64_t chunk_rows,
                    absl::FunctionRef<at::Tensor(const at::Tensor& chunk)> argmax) {
  const at::NoGradGuard no_grad;
  at::Tensor indices = at::empty({x.size(0)}, x.options().dtype(at::kLong));
  for (int64_t begin = 0; begin < x.size(0); begin += chunk_rows) {
    const int64_t rows = std::min(chunk_rows, x.size(0) - begin);
    indices.narrow(0, begin, rows).copy_(argmax(x.narrow(0, begin, rows)));
  }
  return indices;
}

}  // namespace

at::Tensor ArgmaxRows(const at::Tensor& x, const at::Tensor& weight) {
  return InChunks(x, kTileLogits / kMinTileColumns,
                  [&](const at::Tensor& chunk) { return ArgmaxOfChunk(chunk, weight); });
}

at::Tensor ArgmaxRows(const at::Tensor& x, const ops::PackedWeight& weight, int64_t vocabulary) {
  return InChunks(x, std::max<int64_t>(1, kTileLogits / vocabulary), [&](const at::Tensor& chunk) {
    return weight.Linear(chunk, /*bias=*/{}, vocabulary).argmax(/*dim=*/1);
  });
}

}  // namespace tandem::speculator
