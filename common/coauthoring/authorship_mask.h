// The authorship mask of a response, and the metrics that follow from it. A mask has one entry per
// *response* token; prompt and padding tokens have none. Tokens of an environment divide a response
// into turns, and are counted nowhere.
#ifndef TANDEM_COMMON_COAUTHORING_AUTHORSHIP_MASK_H_
#define TANDEM_COMMON_COAUTHORING_AUTHORSHIP_MASK_H_

#include <cstdint>
#include <span>
#include <vector>

#include "common/coauthoring/author.h"

namespace tandem {

// Returns the number of t >= 1 with a_t != a_{t-1}, of tokens of models.
int64_t CountSwitches(std::span<const Author> mask);

// Returns the number of sentences of a turn: one ends after each token for which `ends_sentence` is
// true, and one at the turn's end if tokens are left. 0 for an empty turn.
int64_t CountSentences(std::span<const bool> ends_sentence);

// Sums over the sequences of a batch; the getters are the reported metrics.
class AuthorshipStats {
 public:
  // Adds one finished response. `ends_sentence[t]` is whether token t is in the `sentence` default
  // set.
  void Add(std::span<const Author> mask, std::span<const bool> ends_sentence);

  int64_t response_tokens() const { return senior_tokens_ + junior_tokens_; }
  // Fractions of response tokens in [0, 1]; 0 for an empty batch.
  double senior_token_fraction() const;
  double junior_token_fraction() const;
  // Mean over sequences.
  double switches_per_seq() const;
  // Response tokens divided by sentences.
  double tokens_per_sent() const;

 private:
  int64_t senior_tokens_ = 0;
  int64_t junior_tokens_ = 0;
  int64_t sequences_ = 0;
  int64_t switches_ = 0;
  int64_t sentences_ = 0;
};

}  // namespace tandem

#endif  // TANDEM_COMMON_COAUTHORING_AUTHORSHIP_MASK_H_
