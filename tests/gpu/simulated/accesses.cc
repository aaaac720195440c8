#include "tests/gpu/simulated/accesses.h"

#include <algorithm>
#include <iterator>

namespace tandem::simulated_gpu {

std::optional<int> Accesses::Add(size_t begin, size_t end, bool writes, int stream,
                                 const Progress& before) {
  end = std::min(end, bytes_);
  if (begin >= end) return std::nullopt;
  Divide(begin);
  Divide(end);
  const auto first = parts_.find(begin);
  const auto last = parts_.lower_bound(end);
  for (auto part = first; part != last; ++part) {
    Access& access = part->second;
    if (access.written > before[access.writer]) return access.writer;
    if (!writes) {
      access.read[stream] = before[stream];
      continue;
    }
    for (int other = 0; other < kStreams; ++other) {
      if (access.read[other] > before[other]) return other;
    }
  }
  if (!writes) return std::nullopt;
  // All that was done with these bytes comes before this write.
  first->second = {.writer = stream, .written = before[stream], .read = {}};
  parts_.erase(std::next(first), last);
  return std::nullopt;
}

std::optional<int> Accesses::UsedAfter(const Progress& before,
                                       const std::array<bool, kStreams>& left_out) const {
  for (const auto& [_, access] : parts_) {
    for (int stream = 0; stream < kStreams; ++stream) {
      const int64_t last =
          std::max(access.read[stream], access.writer == stream ? access.written : int64_t{0});
      if (last > before[stream] && !left_out[stream]) return stream;
    }
  }
  return std::nullopt;
}

bool Accesses::WrittenAfter(const Progress& before) const {
  return std::ranges::any_of(
      parts_, [&](const auto& part) { return part.second.written > before[part.second.writer]; });
}

void Accesses::Divide(size_t at) {
  if (at >= bytes_) return;
  const auto next = parts_.upper_bound(at);
  const auto part = std::prev(next);
  if (part->first < at) parts_.emplace_hint(next, at, part->second);
}

}  // namespace tandem::simulated_gpu
