#include "common/base/bounded_json.h"

#include <algorithm>
#include <set>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "common/base/git_lfs.h"

namespace tandem {
namespace {

int MaxDepth(absl::string_view text) {
  int depth = 0, deepest = 0;
  bool in_string = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (in_string) {
      if (c == '\\') {
        ++i;
      } else if (c == '"') {
        in_string = false;
      }
    } else if (c == '"') {
      in_string = true;
    } else if (c == '{' || c == '[') {
      deepest = std::max(deepest, ++depth);
    } else if (c == '}' || c == ']') {
      --depth;
    }
  }
  return deepest;
}

}  // namespace

absl::StatusOr<nlohmann::json> ParseBoundedJson(absl::string_view text, absl::string_view name) {
  using nlohmann::json;
  if (IsGitLfsPointer(text)) return GitLfsPointerError(name);
  if (MaxDepth(text) > kMaxJsonDepth) {
    return absl::InvalidArgumentError(
        absl::StrCat(name, ": JSON is nested deeper than ", kMaxJsonDepth, " levels"));
  }
  std::vector<std::set<std::string>> keys;
  std::string duplicate;
  const auto track = [&](int, json::parse_event_t event, json& parsed) {
    if (event == json::parse_event_t::object_start) {
      keys.emplace_back();
    } else if (event == json::parse_event_t::object_end) {
      keys.pop_back();
    } else if (event == json::parse_event_t::key) {
      std::string key = parsed.get<std::string>();
      if (!keys.back().insert(key).second && duplicate.empty()) duplicate = std::move(key);
    }
    return true;
  };
  json document = json::parse(text.data(), text.data() + text.size(), track, false);
  if (document.is_discarded()) {
    return absl::InvalidArgumentError(absl::StrCat(name, ": not valid JSON"));
  }
  if (!duplicate.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(name, ": key '", duplicate, "' appears twice"));
  }
  return document;
}

}  // namespace tandem
