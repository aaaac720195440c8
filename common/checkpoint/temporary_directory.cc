#include "common/checkpoint/temporary_directory.h"

#include <unistd.h>

#include <filesystem>
#include <system_error>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "common/base/file_descriptor.h"

namespace tandem::checkpoint {
namespace {

namespace fs = std::filesystem;

bool IsTemporaryNameOf(absl::string_view entry, absl::string_view name) {
  if (!absl::ConsumePrefix(&entry, ".tmp-")) return false;
  while (!entry.empty() && absl::ascii_isdigit(entry[0])) entry.remove_prefix(1);
  return absl::ConsumePrefix(&entry, "-") && entry == name;
}

}  // namespace

std::string TemporaryName(const std::string& name) {
  return absl::StrCat(".tmp-", ::getpid(), "-", name);
}

absl::StatusOr<std::string> CreateTemporaryDirectory(const std::string& parent,
                                                     const std::string& name) {
  std::error_code error;
  fs::create_directories(parent, error);
  if (error) return FileError(error.value(), "cannot create", parent);
  std::vector<fs::path> leftovers;
  for (const fs::directory_entry& entry : fs::directory_iterator(parent, error)) {
    if (IsTemporaryNameOf(entry.path().filename().string(), name)) {
      leftovers.push_back(entry.path());
    }
  }
  for (const fs::path& path : leftovers) {
    fs::remove_all(path, error);
    if (error) return FileError(error.value(), "cannot remove", path.string());
  }
  const fs::path temporary = fs::path(parent) / TemporaryName(name);
  fs::create_directory(temporary, error);
  if (error) return FileError(error.value(), "cannot create", temporary.string());
  return temporary.string();
}

}  // namespace tandem::checkpoint
