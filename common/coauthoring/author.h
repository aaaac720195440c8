// The author of a token, and the meaning of each author for code that reads the token.
#ifndef TANDEM_COMMON_COAUTHORING_AUTHOR_H_
#define TANDEM_COMMON_COAUTHORING_AUTHOR_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>

namespace tandem {

// The values of authorship_mask.
enum class Author : uint8_t { kJunior = 0, kSenior = 1, kEnvironment = 2 };

// A new author is a new row of kAuthorTraits: nobody asks for an author's number.
struct AuthorTraits {
  // A model draws the author's tokens, in a lane of its own: the index of that lane. Tokens of an
  // author without one are given between two turns of the models: no loss, no step of the critic,
  // and no part of a response's length has them.
  std::optional<size_t> lane;
  // The model in training wrote the token: it has weight 1 in the policy's loss, and it is a step
  // of the critic's. The other tokens of models have junior_token_loss_weight.
  bool is_policy = false;
};

inline constexpr std::array<AuthorTraits, 3> kAuthorTraits = {{
    {.lane = 1, .is_policy = false},  // kJunior
    {.lane = 0, .is_policy = true},   // kSenior
    {},                               // kEnvironment
}};

constexpr const AuthorTraits& TraitsOf(Author author) {
  return kAuthorTraits.at(static_cast<size_t>(author));
}

constexpr bool IsPolicy(Author author) { return TraitsOf(author).is_policy; }

// Whether a model drew the author's tokens.
constexpr bool IsDrawn(Author author) { return TraitsOf(author).lane.has_value(); }

// Returns the author of a byte of authorship_mask; nullopt for a byte that names none.
constexpr std::optional<Author> AuthorOf(uint8_t byte) {
  if (byte >= kAuthorTraits.size()) return std::nullopt;
  return static_cast<Author>(byte);
}

}  // namespace tandem

#endif  // TANDEM_COMMON_COAUTHORING_AUTHOR_H_
