#include "common/ranks/transport/gpu_sharing.h"

#include <map>

namespace tandem::ranks {

std::optional<std::pair<int, int>> RanksOnOneGpu(const std::vector<std::string>& gpus) {
  std::map<std::string, int> first;
  for (int rank = 0; rank < static_cast<int>(gpus.size()); ++rank) {
    const auto [found, is_new] = first.emplace(gpus[static_cast<size_t>(rank)], rank);
    if (!is_new) return std::pair(found->second, rank);
  }
  return std::nullopt;
}

}  // namespace tandem::ranks
