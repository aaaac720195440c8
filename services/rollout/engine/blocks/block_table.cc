#include "services/rollout/engine/blocks/block_table.h"

#include <algorithm>
#include <optional>
#include <string>

#include "common/model/passes/layer_cache.h"

namespace tandem::rollout {
namespace {

// Whether `tokens` contain block number `block` as a whole.
bool Contains(std::span<const int32_t> tokens, int64_t block) {
  return (block + 1) * kKvBlockTokens <= static_cast<int64_t>(tokens.size());
}

std::span<const int32_t> TokensOf(std::span<const int32_t> tokens, int64_t block) {
  return tokens.subspan(block * kKvBlockTokens, kKvBlockTokens);
}

std::string ImagesOf(std::span<const ImageTokens> images, int64_t block,
                     int64_t tokens = kKvBlockTokens) {
  return IdentitiesAmong(images, block * kKvBlockTokens, block * kKvBlockTokens + tokens);
}

}  // namespace

int64_t BlockTable::TakeKnown(BlockPool& pool, std::span<const int32_t> tokens,
                              std::span<const ImageTokens> images) {
  while (Contains(tokens, num_known_)) {
    const auto found =
        pool.Find(prefix_, TokensOf(tokens, num_known_), ImagesOf(images, num_known_));
    if (!found.has_value()) break;
    blocks_.push_back(found->block);
    prefix_ = found->prefix;
    ++num_known_;
  }
  return num_known_ * kKvBlockTokens;
}

int64_t BlockTable::TakeBegun(BlockPool& pool, std::span<const int32_t> tokens,
                              std::span<const ImageTokens> images) {
  std::span<const int32_t> next = tokens.subspan(num_known_ * kKvBlockTokens);
  next = next.first(std::min<int64_t>(std::ssize(next), kKvBlockTokens - 1));
  const int64_t begun = pool.LongestKnown(prefix_, next);
  if (begun == 0) return 0;
  const auto block = pool.TakeIdle(prefix_, next.first(begun), ImagesOf(images, num_known_, begun));
  if (!block.has_value()) return 0;
  blocks_.push_back(*block);
  return begun;
}

bool BlockTable::Grow(BlockPool& pool) {
  const std::optional<int32_t> block = pool.Allocate();
  if (block.has_value()) blocks_.push_back(*block);
  return block.has_value();
}

void BlockTable::Remember(BlockPool& pool, std::span<const int32_t> tokens,
                          std::span<const ImageTokens> images) {
  for (; Contains(tokens, num_known_); ++num_known_) {
    prefix_ = pool.Remember(blocks_[num_known_], prefix_, TokensOf(tokens, num_known_),
                            ImagesOf(images, num_known_));
  }
}

void BlockTable::RememberBegun(BlockPool& pool, std::span<const int32_t> tokens,
                               std::span<const ImageTokens> images) {
  const std::span<const int32_t> begun = tokens.subspan(num_known_ * kKvBlockTokens);
  if (begun.empty() || num_known_ < num_dropped_) return;
  pool.Remember(blocks_[num_known_], prefix_, begun,
                ImagesOf(images, num_known_, std::ssize(begun)));
}

void BlockTable::Shrink(BlockPool& pool, int64_t size) {
  // The last one first: see BlockPool::Release.
  for (; this->size() > size; blocks_.pop_back()) {
    if (this->size() > num_dropped_) pool.Release(blocks_.back());
  }
  num_dropped_ = std::min(num_dropped_, this->size());
}

void BlockTable::DropFirst(BlockPool& pool, int64_t count) {
  for (; num_dropped_ < count; ++num_dropped_) pool.Release(blocks_[num_dropped_]);
}

void BlockTable::Release(BlockPool& pool) {
  Shrink(pool, 0);
  num_known_ = 0;
  prefix_ = root_;
}

}  // namespace tandem::rollout
