#include "services/rollout/engine/drafts/ngram_drafter.h"

#include <algorithm>
#include <iterator>

#include "absl/functional/function_ref.h"

namespace tandem::rollout {
namespace {

// Calls `visit` with a hash of each suffix of `tokens` of `shortest` to `longest` tokens, the
// shortest first.
void VisitSuffixes(std::span<const int32_t> tokens, int64_t shortest, int64_t longest,
                   absl::FunctionRef<void(uint64_t hash)> visit) {
  uint64_t hash = 0;
  const int64_t most = std::min<int64_t>(longest, std::ssize(tokens));
  for (int64_t n = 1; n <= most; ++n) {
    hash = (hash ^ static_cast<uint64_t>(tokens[tokens.size() - n] + 1)) * 0x9E3779B97F4A7C15;
    hash ^= hash >> 29;
    if (n >= shortest) visit(hash);
  }
}

}  // namespace

void NgramDrafter::Propose(std::span<const int32_t> tokens, int64_t most,
                           std::vector<int32_t>& drafts) {
  const int64_t length = std::ssize(tokens);
  while (indexed_ < length - 1) {
    ++indexed_;
    VisitSuffixes(tokens.first(indexed_), shortest_, longest_,
                  [&](uint64_t hash) { ends_[hash] = indexed_; });
  }
  int64_t end = length;  // of the earlier occurrence
  VisitSuffixes(tokens, shortest_, longest_, [&](uint64_t hash) {
    if (const auto found = ends_.find(hash); found != ends_.end()) end = found->second;
  });
  if (end == length) return;
  const size_t first = drafts.size();
  for (int64_t i = 0; i < most; ++i) {
    const int64_t position = end + i;
    drafts.push_back(position < length ? tokens[position] : drafts[first + position - length]);
  }
}

}  // namespace tandem::rollout
