// Masks of authors in few letters.
#ifndef TANDEM_COMMON_COAUTHORING_TESTING_AUTHORS_H_
#define TANDEM_COMMON_COAUTHORING_TESTING_AUTHORS_H_

#include <stdexcept>
#include <string_view>
#include <vector>

#include "common/coauthoring/author.h"

namespace tandem {

// Returns the authors of "SJES": senior, junior, environment, senior.
inline std::vector<Author> Authors(std::string_view letters) {
  std::vector<Author> mask;
  for (const char letter : letters) {
    const size_t author = std::string_view("JSE").find(letter);
    if (author == std::string_view::npos) throw std::invalid_argument("no author has this letter");
    mask.push_back(static_cast<Author>(author));
  }
  return mask;
}

}  // namespace tandem

#endif  // TANDEM_COMMON_COAUTHORING_TESTING_AUTHORS_H_
