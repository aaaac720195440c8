// The blocks of one sequence in one lane's cache.
#ifndef TANDEM_SERVICES_ROLLOUT_ENGINE_BLOCKS_BLOCK_TABLE_H_
#define TANDEM_SERVICES_ROLLOUT_ENGINE_BLOCKS_BLOCK_TABLE_H_

#include <cstdint>
#include <span>
#include <vector>

#include "services/rollout/engine/blocks/block_pool.h"
#include "services/rollout/engine/images/image_tokens.h"

namespace tandem::rollout {

// Every call gets the same pool. The table holds its blocks until Release, or DropFirst for the
// first ones; it does not know the pool, so that a sequence is plain data.
class BlockTable {
 public:
  BlockTable() = default;
  // `root` is kNoPrefix or kNoRecordedPrefix.
  explicit BlockTable(PrefixId root) : root_(root), prefix_(root) {}

  // blocks()[i] is that of the positions from i * kKvBlockTokens on. Others may hold the first
  // num_dropped() of them by now.
  std::span<const int32_t> blocks() const { return blocks_; }
  bool empty() const { return blocks_.empty(); }
  int64_t size() const { return static_cast<int64_t>(blocks_.size()); }
  int64_t num_dropped() const { return num_dropped_; }

  // Fills an empty table with the blocks that are known to contain the start of `tokens`, of which
  // some stand for `images`; returns the number of tokens in them.
  int64_t TakeKnown(BlockPool& pool, std::span<const int32_t> tokens,
                    std::span<const ImageTokens> images = {});
  // Adds to what TakeKnown has taken the block that an ended sequence began, if it contains the
  // next of `tokens`; returns their number.
  int64_t TakeBegun(BlockPool& pool, std::span<const int32_t> tokens,
                    std::span<const ImageTokens> images = {});
  // Adds a block. Returns false if none is idle.
  bool Grow(BlockPool& pool);
  // Tells the pool what the whole blocks contain: the first of `tokens`, which the model has
  // consumed.
  void Remember(BlockPool& pool, std::span<const int32_t> tokens,
                std::span<const ImageTokens> images = {});
  // Tells the pool what the last block contains, if a part of it: the last of `tokens`. The table
  // may only be released then.
  void RememberBegun(BlockPool& pool, std::span<const int32_t> tokens,
                     std::span<const ImageTokens> images = {});
  // Gives back the blocks after the first `size`, none of which Remember has told the pool of.
  void Shrink(BlockPool& pool, int64_t size);
  // Gives back the first `count` blocks, which nothing reads any more: they lie before the window
  // of every layer. Of those that Remember has told of, the pool still knows the contents.
  void DropFirst(BlockPool& pool, int64_t count);
  // Gives all blocks back.
  void Release(BlockPool& pool);

 private:
  PrefixId root_ = kNoPrefix;
  std::vector<int32_t> blocks_;
  int64_t num_dropped_ = 0;      // of the first blocks
  int64_t num_known_ = 0;        // of the first blocks, whose contents the pool knows
  PrefixId prefix_ = kNoPrefix;  // up to the end of those
};

}  // namespace tandem::rollout

#endif  // TANDEM_SERVICES_ROLLOUT_ENGINE_BLOCKS_BLOCK_TABLE_H_
