// Finds the token that completes a stop text.
#ifndef TANDEM_COMMON_COAUTHORING_STOP_TEXT_H_
#define TANDEM_COMMON_COAUTHORING_STOP_TEXT_H_

#include <algorithm>
#include <span>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace tandem {

// Looks for texts in a text that grows token by token. It keeps as many bytes of the text's end as
// may begin one of them.
class StopTextFinder {
 public:
  // Finds nothing.
  StopTextFinder() = default;
  // `stops` outlive the object; none is empty.
  explicit StopTextFinder(std::span<const std::string> stops) : stops_(stops) {
    for (const std::string& stop : stops) kept_bytes_ = std::max(kept_bytes_, stop.size() - 1);
  }

  // Whether there is a text to look for.
  bool active() const { return !stops_.empty(); }

  // Takes the bytes of the next token, which may be a part of a UTF-8 character. Returns whether
  // the text so far contains a stop text.
  bool OnText(absl::string_view text) {
    absl::StrAppend(&end_, text);
    const bool found = std::ranges::any_of(
        stops_, [&](const std::string& stop) { return absl::StrContains(end_, stop); });
    if (end_.size() > kept_bytes_) end_.erase(0, end_.size() - kept_bytes_);
    return found;
  }

 private:
  std::span<const std::string> stops_;
  size_t kept_bytes_ = 0;
  std::string end_;  // of the text
};

}  // namespace tandem

#endif  // TANDEM_COMMON_COAUTHORING_STOP_TEXT_H_
