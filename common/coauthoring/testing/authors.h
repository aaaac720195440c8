// Masks of authors in few letters.
#ifndef TANDEM_COMMON_COAUTHORING_TESTING_AUTHORS_H_
#define TANDEM_COMMON_COAUTHORING_TESTING_AUTHORS_H_

#include <stdexcept>
#include <string_view>
#include <vector>

#include "common/coauthoring/author.h"

namespace tandem {

// Returns the authors of "SJS": senior, junior, senior.
inline std::vector<Author> Authors(std::string_view letters) {
  std::vector<Author> mask;
  for (const char letter : letters) {
    if (letter != 'S' && letter != 'J') throw std::invalid_argument("no author has this letter");
    mask.push_back(letter == 'S' ? Author::kSenior : Author::kJunior);
  }
  return mask;
}

}  // namespace tandem

#endif  // TANDEM_COMMON_COAUTHORING_TESTING_AUTHORS_H_
