// The values of strategy.name, which the configuration and the strategies themselves read.
#ifndef TANDEM_COMMON_PARALLEL_STRATEGY_NAME_H_
#define TANDEM_COMMON_PARALLEL_STRATEGY_NAME_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "common/base/errors/error.h"

namespace tandem {

// INVALID_ARGUMENT, naming "strategy.name", for anything but "single", "zero" and "megatron".
inline absl::Status CheckStrategyName(absl::string_view name) {
  if (name == "single" || name == "zero" || name == "megatron") return absl::OkStatus();
  return InvalidField("strategy.name",
                      absl::StrCat("must be single, zero or megatron, got \"", name, "\""));
}

// INVALID_ARGUMENT, naming "strategy.name", for strategy "single" with several ranks.
inline absl::Status CheckSingleRank(int64_t ranks) {
  if (ranks == 1) return absl::OkStatus();
  return InvalidField("strategy.name", absl::StrCat("single is for one rank, but the server has ",
                                                    ranks, ": use zero or megatron"));
}

}  // namespace tandem

#endif  // TANDEM_COMMON_PARALLEL_STRATEGY_NAME_H_
