#include "common/base/available_memory.h"

#include <algorithm>
#include <fstream>
#include <sstream>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

namespace tandem {
namespace {

// The number after `key` in a file of "key value" lines, as in meminfo and memory.stat.
std::optional<int64_t> Field(const std::string& path, const std::string& key) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string word;
    int64_t value = 0;
    if (words >> word >> value && word == key) return value;
  }
  return std::nullopt;
}

// A file that holds one number; nullopt for "max".
std::optional<int64_t> Number(const std::string& path) {
  std::ifstream file(path);
  std::string text;
  int64_t value = 0;
  if (!(file >> text) || !absl::SimpleAtoi(text, &value)) return std::nullopt;
  return value;
}

// Bytes that one control group leaves.
std::optional<int64_t> Left(const std::string& group) {
  const std::optional<int64_t> limit = Number(group + "/memory.max");
  const std::optional<int64_t> used = Number(group + "/memory.current");
  if (!limit.has_value() || !used.has_value()) return std::nullopt;
  const int64_t cache = Field(group + "/memory.stat", "inactive_file").value_or(0);
  return std::max<int64_t>(0, *limit - std::max<int64_t>(0, *used - cache));
}

}  // namespace

std::optional<int64_t> AvailableMemoryBytes(const std::string& root) {
  std::optional<int64_t> available = Field(root + "/proc/meminfo", "MemAvailable:");
  if (available.has_value()) *available *= 1024;
  std::ifstream groups(root + "/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    absl::string_view path = line;
    if (!absl::ConsumePrefix(&path, "0::")) continue;
    // A limit of any ancestor holds too.
    for (std::string group(absl::StripSuffix(path, "/"));; group.resize(group.rfind('/'))) {
      const std::optional<int64_t> left = Left(absl::StrCat(root, "/sys/fs/cgroup", group));
      if (left.has_value()) available = std::min(available.value_or(*left), *left);
      if (group.rfind('/') == std::string::npos) break;
    }
  }
  return available;
}

}  // namespace tandem
