#include "common/coauthoring/author_selector.h"

#include <algorithm>
#include <utility>

#include "common/base/philox.h"

namespace tandem {

TokenSet::TokenSet(std::span<const int32_t> ids) {
  for (const int32_t id : ids) {
    if (id < 0) continue;
    if (static_cast<size_t>(id) >= bits_.size()) bits_.resize(id + 1);
    bits_[id] = true;
  }
}

std::vector<int32_t> TokenSet::ids() const {
  std::vector<int32_t> result;
  for (size_t id = 0; id < bits_.size(); ++id) {
    if (bits_[id]) result.push_back(static_cast<int32_t>(id));
  }
  return result;
}

AuthorSelector::AuthorSelector(const TandemConfig& config, uint64_t seed, uint64_t sample_index,
                               std::shared_ptr<const TokenSet> boundaries)
    : enabled_(config.enabled),
      strategy_(config.selection_strategy),
      prob_senior_(config.prob_senior),
      chunk_size_(std::max(config.chunk_size, 1)),
      max_gap_tokens_(std::max(config.max_gap_tokens, 1)),
      seed_(seed),
      sample_index_(sample_index),
      boundaries_(boundaries ? std::move(boundaries) : std::make_shared<TokenSet>()) {
  next_ = Choose(/*after_boundary=*/false);
}

std::optional<Author> AuthorSelector::AuthorAfterNext() const {
  if (!enabled_) return next_;
  AuthorSelector after_boundary = *this, after_other = *this;
  after_boundary.Advance(true);
  after_other.Advance(false);
  if (after_boundary.next_ != after_other.next_) return std::nullopt;
  return after_other.next_;
}

void AuthorSelector::OnToken(int32_t id) { Advance(boundaries_->contains(id)); }

void AuthorSelector::Advance(bool is_boundary) {
  ++t_;
  ++since_draw_;
  next_ = Choose(is_boundary);
}

void AuthorSelector::OnEnvironmentToken() {
  // The text of an environment may have many tokens, and may come first.
  if (t_ > turn_begin_) ++turns_;
  ++t_;
  turn_begin_ = t_;
  next_ = Choose(/*after_boundary=*/false);
}

Author AuthorSelector::Coin() const {
  const double u = Uniform(seed_, sample_index_, static_cast<uint32_t>(t_), RandomPurpose::kAuthor);
  return u < prob_senior_ ? Author::kSenior : Author::kJunior;
}

// The author of token t_; next_ still holds the author of t_ - 1.
Author AuthorSelector::Choose(bool after_boundary) {
  if (!enabled_) return Author::kSenior;
  const int64_t of_turn = t_ - turn_begin_;
  switch (strategy_) {
    case SelectionStrategy::kBernoulli:
      return Coin();
    case SelectionStrategy::kChunk:
      return of_turn / chunk_size_ % 2 == 0 ? Author::kSenior : Author::kJunior;
    case SelectionStrategy::kAlternating:
      return of_turn % 2 == 0 ? Author::kSenior : Author::kJunior;
    case SelectionStrategy::kSentence:
      if (of_turn == 0) return Author::kSenior;
      if (!after_boundary) return next_;
      return next_ == Author::kSenior ? Author::kJunior : Author::kSenior;
    case SelectionStrategy::kWord:
      if (of_turn > 0 && !after_boundary && since_draw_ < max_gap_tokens_) return next_;
      since_draw_ = 0;
      return Coin();
    case SelectionStrategy::kTurn:
      return turns_ % 2 == 0 ? Author::kSenior : Author::kJunior;
  }
  return Author::kSenior;
}

}  // namespace tandem
