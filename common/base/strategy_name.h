// The values of strategy.name, which the configuration and the strategies themselves read.
#ifndef TANDEM_COMMON_BASE_STRATEGY_NAME_H_
#define TANDEM_COMMON_BASE_STRATEGY_NAME_H_

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "common/base/error.h"

namespace tandem {

// OK for "single" and "zero"; UNIMPLEMENTED for "megatron", INVALID_ARGUMENT for others, both
// naming "strategy.name".
inline absl::Status CheckStrategyName(absl::string_view name) {
  if (name == "single" || name == "zero") return absl::OkStatus();
  if (name == "megatron") {
    return FieldError(absl::StatusCode::kUnimplemented, "strategy.name",
                      absl::StrCat(name, " is not there yet; use single or zero"));
  }
  return InvalidField("strategy.name",
                      absl::StrCat("must be single, zero or megatron, got \"", name, "\""));
}

}  // namespace tandem

#endif  // TANDEM_COMMON_BASE_STRATEGY_NAME_H_
