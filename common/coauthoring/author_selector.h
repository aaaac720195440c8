// Chooses the author of each token. The state is a pure function of (config, seed, sample_index,
// emitted tokens), so a replayed sequence continues identically.
#ifndef TANDEM_COMMON_COAUTHORING_AUTHOR_SELECTOR_H_
#define TANDEM_COMMON_COAUTHORING_AUTHOR_SELECTOR_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "common/coauthoring/author.h"
#include "common/coauthoring/tandem_config.h"

namespace tandem {

// A set of token ids with constant-time lookup.
class TokenSet {
 public:
  TokenSet() = default;
  explicit TokenSet(std::span<const int32_t> ids);

  bool contains(int32_t id) const {
    return id >= 0 && static_cast<size_t>(id) < bits_.size() && bits_[id];
  }
  // Returns the members in ascending order.
  std::vector<int32_t> ids() const;

 private:
  std::vector<bool> bits_;
};

// With coin(t) = senior iff Uniform(seed, sample_index, t, kAuthor) < prob_senior, and b the first
// token of the turn: 0, or the token behind the last one of an environment.
//   disabled     senior
//   bernoulli    coin(t)
//   chunk        senior iff floor((t - b) / chunk_size) is even
//   alternating  senior iff t - b is even
//   sentence     senior at b; toggles after every emitted token of the boundary set
//   word         coin(b); coin(t) after a boundary token or max_gap_tokens tokens without a draw,
//                else the author of t - 1
//   turn         senior iff the number of turns before this one is even
class AuthorSelector {
 public:
  // `boundaries` is the boundary set in force (see BoundarySets::Resolve); null is an empty set.
  AuthorSelector(const TandemConfig& config, uint64_t seed, uint64_t sample_index,
                 std::shared_ptr<const TokenSet> boundaries);

  // Returns the author of token number size(), and does not advance.
  Author NextAuthor() const { return next_; }
  // Returns the author of token number size() + 1; nullopt if it depends on token number size().
  std::optional<Author> AuthorAfterNext() const;

  // Adds token number size(), which is `id`.
  void OnToken(int32_t id);

  // Adds a token of an environment: the next one begins a turn.
  void OnEnvironmentToken();

  int64_t size() const { return t_; }

 private:
  void Advance(bool is_boundary);
  Author Coin() const;
  Author Choose(bool after_boundary);

  bool enabled_;
  SelectionStrategy strategy_;
  double prob_senior_;
  int32_t chunk_size_;
  int32_t max_gap_tokens_;
  uint64_t seed_;
  uint64_t sample_index_;
  std::shared_ptr<const TokenSet> boundaries_;

  int64_t t_ = 0;
  int64_t turn_begin_ = 0;
  // Number of turns before this one: of tokens that an environment has answered.
  int64_t turns_ = 0;
  // Number of tokens since the last draw (word).
  int32_t since_draw_ = 0;
  Author next_ = Author::kSenior;
};

}  // namespace tandem

#endif  // TANDEM_COMMON_COAUTHORING_AUTHOR_SELECTOR_H_
