#include "common/base/machine/rank_environment.h"

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/base/errors/error.h"
#include "common/base/errors/field_check.h"
#include "common/base/errors/status_macros.h"

namespace tandem {
namespace {

constexpr int kMaxPort = 65535;
constexpr const char* kVariables[] = {"RANK",        "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE",
                                      "MASTER_ADDR", "MASTER_PORT"};

std::optional<std::string> Variable(const char* name) {
  const char* value = std::getenv(name);
  if (value == nullptr) return std::nullopt;
  return value;
}

// Names the variables that are there: the user may not know that they are.
absl::Status Missing(const char* name) {
  std::vector<std::string> given;
  for (const char* other : kVariables) {
    if (const auto value = Variable(other)) given.push_back(absl::StrCat(other, "='", *value, "'"));
  }
  std::string remedy = "set it too to start one of several ranks, or unset the others";
  // "tcp://10.0.0.7:29500", of a Service called master.
  if (absl::StartsWith(Variable("MASTER_PORT").value_or(""), "tcp://")) {
    absl::StrAppend(
        &remedy, "; Kubernetes sets MASTER_PORT in every pod of a namespace with a Service called ",
        "master: rename the Service, or set enableServiceLinks: false");
  }
  return InvalidField(name, absl::StrCat("is not set, but the environment has ",
                                         absl::StrJoin(given, ", "), ": ", remedy));
}

absl::StatusOr<int> IntVariable(const char* name, int min, int max) {
  const std::optional<std::string> text = Variable(name);
  if (!text.has_value()) return Missing(name);
  int value = 0;
  if (!absl::SimpleAtoi(*text, &value)) {
    return InvalidField(name, absl::StrCat("must be a number, got '", *text, "'"));
  }
  TANDEM_RETURN_IF_ERROR(CheckInRange(name, value, min, max));
  return value;
}

}  // namespace

absl::StatusOr<RankEnvironment> ReadRankEnvironment() {
  const bool any = std::any_of(std::begin(kVariables), std::end(kVariables),
                               [](const char* name) { return Variable(name).has_value(); });
  RankEnvironment environment;
  if (!any) return environment;
  TANDEM_ASSIGN_OR_RETURN(environment.world_size,
                          IntVariable("WORLD_SIZE", 1, std::numeric_limits<int>::max()));
  TANDEM_ASSIGN_OR_RETURN(environment.rank, IntVariable("RANK", 0, environment.world_size - 1));
  environment.local_world_size = environment.world_size;
  if (Variable("LOCAL_WORLD_SIZE").has_value()) {
    TANDEM_ASSIGN_OR_RETURN(environment.local_world_size,
                            IntVariable("LOCAL_WORLD_SIZE", 1, environment.world_size));
  }
  environment.local_rank = environment.rank % environment.local_world_size;
  if (Variable("LOCAL_RANK").has_value()) {
    TANDEM_ASSIGN_OR_RETURN(environment.local_rank,
                            IntVariable("LOCAL_RANK", 0, environment.local_world_size - 1));
  }
  environment.master_addr = Variable("MASTER_ADDR").value_or("");
  if (environment.master_addr.empty()) return Missing("MASTER_ADDR");
  TANDEM_ASSIGN_OR_RETURN(environment.master_port, IntVariable("MASTER_PORT", 1, kMaxPort));
  return environment;
}

}  // namespace tandem
