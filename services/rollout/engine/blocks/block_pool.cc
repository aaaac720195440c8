#include "services/rollout/engine/blocks/block_pool.h"

#include <algorithm>
#include <iterator>

namespace tandem::rollout {

BlockPool::BlockPool(const BlockRange& range) : first_block_(range.first), blocks_(range.count) {
  for (int64_t i = 0; i < range.count; ++i) {
    blocks_[i].place = idle_.insert(idle_.end(), static_cast<int32_t>(range.first + i));
    blocks_[i].known = known_.end();
  }
}

void BlockPool::Hold(int32_t block) {
  Block& state = at(block);
  if (state.holders++ == 0) held_.splice(held_.end(), idle_, state.place);
}

std::optional<int32_t> BlockPool::Allocate() {
  if (idle_.empty()) return std::nullopt;
  const int32_t block = idle_.front();
  Block& state = at(block);
  if (state.known != known_.end()) {
    known_.erase(state.known);
    state.known = known_.end();
  }
  Hold(block);
  return block;
}

void BlockPool::Release(int32_t block) {
  Block& state = at(block);
  if (--state.holders > 0) return;
  const bool is_known = state.known != known_.end();
  idle_.splice(is_known ? idle_.end() : idle_.begin(), held_, state.place);
}

std::optional<BlockPool::Known> BlockPool::Find(PrefixId before, std::span<const int32_t> tokens,
                                                const std::string& images) {
  const auto found = known_.find(MakeContents(before, tokens, images));
  if (found == known_.end()) return std::nullopt;
  Hold(found->second.block);
  return found->second;
}

int64_t BlockPool::LongestKnown(PrefixId before, std::span<const int32_t> tokens) const {
  Contents wanted = MakeContents(before, tokens, "");
  while (!wanted.tokens.empty()) {
    auto entry = known_.lower_bound(wanted);
    const auto length = std::ssize(wanted.tokens);
    if (entry != known_.end() && entry->first.before == before &&
        entry->first.tokens == wanted.tokens) {
      return length;
    }
    if (entry == known_.begin()) return 0;
    // All that `wanted` begins with comes before it, and begins with what it has in common with the
    // last entry there.
    const Contents& last = std::prev(entry)->first;
    if (last.before != before) return 0;
    const auto common = std::ranges::mismatch(last.tokens, wanted.tokens).in1 - last.tokens.begin();
    if (common == std::ssize(last.tokens)) return common;
    wanted.tokens.resize(common);
  }
  return 0;
}

std::optional<int32_t> BlockPool::TakeIdle(PrefixId before, std::span<const int32_t> tokens,
                                           const std::string& images) {
  const auto found = known_.find(MakeContents(before, tokens, images));
  if (found == known_.end()) return std::nullopt;
  const int32_t block = found->second.block;
  if (at(block).holders > 0) return std::nullopt;
  known_.erase(found);
  at(block).known = known_.end();
  Hold(block);
  return block;
}

PrefixId BlockPool::Remember(int32_t block, PrefixId before, std::span<const int32_t> tokens,
                             const std::string& images) {
  const auto [entry, is_new] =
      known_.try_emplace(MakeContents(before, tokens, images), Known{block, last_prefix_ + 1});
  if (is_new) {
    ++last_prefix_;
    at(block).known = entry;
  }
  return entry->second.prefix;
}

void BlockPool::Forget() {
  known_.clear();
  for (Block& block : blocks_) block.known = known_.end();
}

}  // namespace tandem::rollout
