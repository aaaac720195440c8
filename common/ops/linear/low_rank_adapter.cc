#include "common/ops/linear/low_rank_adapter.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "common/ops/linear/linear_weight.h"

namespace tandem::ops {

std::vector<const LinearWeight*> OfAdapters(
    const std::vector<const LinearWeight*>& maps,
    absl::FunctionRef<const LinearWeight*(const LowRankAdapter&)> part) {
  std::vector<const LinearWeight*> parts;
  for (const LinearWeight* map : maps) parts.push_back(part(*map->adapter()));
  return parts;
}

at::Tensor AddAdapters(const at::Tensor& y, const LowRankAdapter& adapter,
                       absl::FunctionRef<at::Tensor(size_t map)> product) {
  if (!at::GradMode::is_enabled()) {
    for (size_t i = 0; i < adapter.maps.size(); ++i) {
      y.narrow(1, adapter.maps[i].column, adapter.maps[i].width).add_(product(i));
    }
    return y;
  }
  std::vector<at::Tensor> columns;
  int64_t begin = 0;
  const auto take_until = [&](int64_t end) {
    if (begin < end) columns.push_back(y.narrow(1, begin, end - begin));
    begin = end;
  };
  for (size_t i = 0; i < adapter.maps.size(); ++i) {
    const LowRankAdapter::Map& map = adapter.maps[i];
    take_until(map.column);
    columns.push_back(y.narrow(1, map.column, map.width) + product(i));
    begin = map.column + map.width;
  }
  take_until(y.size(1));
  return columns.size() == 1 ? columns.front() : at::cat(columns, 1);
}

}  // namespace tandem::ops
