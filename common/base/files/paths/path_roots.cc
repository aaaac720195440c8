#include "common/base/files/paths/path_roots.h"

#include <algorithm>
#include <filesystem>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/base/errors/error.h"
#include "common/base/errors/status_macros.h"
#include "common/base/files/paths/path_check.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;

// Absolute, without "." and "..", links followed; the end of the path may not exist yet. Empty
// where that fails, and for a link to nothing, whose target is unknown.
fs::path Resolved(const fs::path& path) {
  std::error_code error;
  const fs::path absolute = fs::absolute(path, error);
  if (error) return {};
  fs::path resolved = fs::weakly_canonical(absolute, error);
  if (error) return {};
  if (!resolved.has_filename()) resolved = resolved.parent_path();  // "runs/" is "runs"
  for (fs::path part = resolved; part.has_relative_path(); part = part.parent_path()) {
    if (fs::is_symlink(fs::symlink_status(part, error))) return {};
  }
  return resolved;
}

bool IsInside(const fs::path& path, const fs::path& root) {
  return !root.empty() && !path.empty() &&
         std::mismatch(root.begin(), root.end(), path.begin(), path.end()).first == root.end();
}

}  // namespace

absl::StatusOr<ConfinedPath> PathRoots::Confine(absl::string_view field,
                                                const std::string& path) const {
  TANDEM_RETURN_IF_ERROR(CheckPath(field, path));
  if (!roots_.has_value()) return ConfinedPath(path);
  const fs::path resolved = Resolved(path);
  for (const std::string& root : *roots_) {
    const fs::path resolved_root = Resolved(root);
    if (IsInside(resolved, resolved_root)) {
      return ConfinedPath(resolved.string(), resolved_root.string());
    }
  }
  return WithReason(
      FieldError(absl::StatusCode::kPermissionDenied, field,
                 roots_->empty()
                     ? "clients may not name paths: the server's server.path_roots is empty"
                     : absl::StrCat("is outside the server's server.path_roots: ",
                                    absl::StrJoin(*roots_, ", "))),
      reason::kPathOutsideRoots);
}

}  // namespace tandem
