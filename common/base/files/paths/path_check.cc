#include "common/base/files/paths/path_check.h"

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "common/base/errors/error.h"
#include "common/base/errors/field_check.h"
#include "common/base/errors/status_macros.h"

namespace tandem {

absl::Status CheckPath(absl::string_view field, absl::string_view path) {
  TANDEM_RETURN_IF_ERROR(CheckGiven(field, path));
  if (absl::StrContains(path, '\0')) return InvalidField(field, "holds a NUL byte");
  if (!absl::StartsWith(path, "~")) return absl::OkStatus();
  return InvalidField(
      field, absl::StrCat("\"~\" is not expanded here: write out the home directory, or \"./", path,
                          "\" for a folder of that name"));
}

}  // namespace tandem
