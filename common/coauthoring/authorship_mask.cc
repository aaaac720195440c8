#include "common/coauthoring/authorship_mask.h"

#include <algorithm>

namespace tandem {
namespace {

double Ratio(int64_t numerator, int64_t denominator) {
  return denominator == 0 ? 0.0 : static_cast<double>(numerator) / static_cast<double>(denominator);
}

}  // namespace

int64_t CountSwitches(std::span<const Author> mask) {
  int64_t switches = 0;
  for (size_t t = 1; t < mask.size(); ++t) {
    switches += IsDrawn(mask[t]) && IsDrawn(mask[t - 1]) && mask[t] != mask[t - 1];
  }
  return switches;
}

int64_t CountSentences(std::span<const bool> ends_sentence) {
  if (ends_sentence.empty()) return 0;
  return std::count(ends_sentence.begin(), ends_sentence.end(), true) +
         (ends_sentence.back() ? 0 : 1);
}

void AuthorshipStats::Add(std::span<const Author> mask, std::span<const bool> ends_sentence) {
  senior_tokens_ += std::ranges::count(mask, Author::kSenior);
  junior_tokens_ += std::ranges::count(mask, Author::kJunior);
  ++sequences_;
  switches_ += CountSwitches(mask);
  for (auto turn = mask.begin(); turn != mask.end();) {
    const auto end = std::find_if_not(turn, mask.end(), IsDrawn);
    sentences_ += CountSentences(ends_sentence.subspan(turn - mask.begin(), end - turn));
    turn = std::find_if(end, mask.end(), IsDrawn);
  }
}

double AuthorshipStats::senior_token_fraction() const {
  return Ratio(senior_tokens_, response_tokens());
}
double AuthorshipStats::junior_token_fraction() const {
  return Ratio(junior_tokens_, response_tokens());
}
double AuthorshipStats::switches_per_seq() const { return Ratio(switches_, sequences_); }
double AuthorshipStats::tokens_per_sent() const { return Ratio(response_tokens(), sentences_); }

}  // namespace tandem
