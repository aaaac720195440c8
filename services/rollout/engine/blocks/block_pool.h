// The blocks of one lane's KV cache: who holds them, and which tokens they contain. No tensors.
#ifndef TANDEM_SERVICES_ROLLOUT_ENGINE_BLOCKS_BLOCK_POOL_H_
#define TANDEM_SERVICES_ROLLOUT_ENGINE_BLOCKS_BLOCK_POOL_H_

#include <cstdint>
#include <list>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <vector>

namespace tandem::rollout {

// Stands for all tokens from the start of a sequence to the end of one of its blocks.
using PrefixId = uint64_t;
inline constexpr PrefixId kNoPrefix = 0;  // before the first block
// The same for sequences whose blocks also hold a record of the experts that their tokens took:
// they share none with others.
inline constexpr PrefixId kNoRecordedPrefix = 1;

// Some consecutive blocks of a cache.
struct BlockRange {
  int32_t first = 0;
  int64_t count = 0;
};

// A block may have several holders, who share its contents and must not change them. A block
// without a holder is idle; if its contents were remembered it can still be found, until it is
// given out again: the block that has been idle for longest comes first.
class BlockPool {
 public:
  explicit BlockPool(const BlockRange& range);
  BlockPool(const BlockPool&) = delete;
  BlockPool& operator=(const BlockPool&) = delete;

  int64_t num_blocks() const { return static_cast<int64_t>(blocks_.size()); }
  int64_t num_idle() const { return static_cast<int64_t>(idle_.size()); }
  int64_t num_held() const { return static_cast<int64_t>(held_.size()); }

  // Returns an idle block, which the caller holds now; nullopt if there is none.
  std::optional<int32_t> Allocate();
  // Ends one hold. Blocks of a sequence are released from the last one on, so that the start of a
  // sequence stays longest.
  void Release(int32_t block);

  struct Known {
    int32_t block;
    PrefixId prefix;  // of the sequence up to the end of the block
  };
  // Returns the block that contains `tokens` after the prefix `before`, which the caller holds now;
  // nullopt if none is remembered. `images` says which images the tokens stand for
  // (IdentitiesAmong).
  std::optional<Known> Find(PrefixId before, std::span<const int32_t> tokens,
                            const std::string& images = "");
  // Remembers that `block`, which the caller holds, contains `tokens`, in all of its places or in
  // the first ones, after the prefix `before`, and returns the prefix up to its end. If another
  // block is known to contain them, that one stays the one that is found.
  PrefixId Remember(int32_t block, PrefixId before, std::span<const int32_t> tokens,
                    const std::string& images = "");
  // Returns how many of `tokens` the longest contents have that `tokens` begin with, after the
  // prefix `before`; 0 for none. Images do not count.
  int64_t LongestKnown(PrefixId before, std::span<const int32_t> tokens) const;
  // Does what Find does, for a block that is idle, and forgets its contents: the caller is its only
  // holder and may write behind the tokens.
  std::optional<int32_t> TakeIdle(PrefixId before, std::span<const int32_t> tokens,
                                  const std::string& images = "");
  // Forgets all contents: they come from weights that are gone.
  void Forget();

 private:
  // Compared in full: equal keys are equal tokens, not equal hashes.
  struct Contents {
    PrefixId before;
    std::vector<int32_t> tokens;
    std::string images;
    bool operator<(const Contents& other) const {
      return std::tie(before, tokens, images) < std::tie(other.before, other.tokens, other.images);
    }
  };
  using KnownBlocks = std::map<Contents, Known>;
  struct Block {
    int64_t holders = 0;
    std::list<int32_t>::iterator place;  // in idle_ or held_
    KnownBlocks::iterator known;         // known_.end(): not remembered
  };

  static Contents MakeContents(PrefixId before, std::span<const int32_t> tokens,
                               const std::string& images) {
    return {before, {tokens.begin(), tokens.end()}, images};
  }

  Block& at(int32_t block) { return blocks_[block - first_block_]; }
  void Hold(int32_t block);

  const int32_t first_block_;
  std::vector<Block> blocks_;
  std::list<int32_t> idle_;  // the next to be given out is at the front
  std::list<int32_t> held_;
  KnownBlocks known_;
  PrefixId last_prefix_ = kNoRecordedPrefix;
};

}  // namespace tandem::rollout

#endif  // TANDEM_SERVICES_ROLLOUT_ENGINE_BLOCKS_BLOCK_POOL_H_
