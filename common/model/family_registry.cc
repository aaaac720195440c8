#include "common/model/family_registry.h"

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/model/families/families.h"

namespace tandem {

absl::StatusOr<const Family*> FindFamily(absl::string_view model_type) {
  static const auto* const families =
      new std::vector<Family>{LlamaFamily(), Qwen2Family(), Qwen3Family()};
  std::string known;
  for (const Family& family : *families) {
    if (model_type == absl::string_view(family.model_type)) return &family;
    absl::StrAppend(&known, known.empty() ? "" : ", ", family.model_type);
  }
  return FieldError(absl::StatusCode::kUnimplemented, "config.json.model_type",
                    absl::StrCat(model_type, " is not supported (", known, " are)"));
}

}  // namespace tandem
