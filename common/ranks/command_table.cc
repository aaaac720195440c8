#include "common/ranks/command_table.h"

#include <c10/util/Exception.h>

#include "absl/strings/str_cat.h"

namespace tandem::ranks {

void CommandTable::AddBytes(const std::string& name, ExecuteBytes execute) {
  const bool is_new = commands_.emplace(name, std::move(execute)).second;
  TORCH_CHECK(is_new && !name.empty(), "command '", name, "' was added before, or has no name");
}

absl::Status CommandTable::Run(const RankCommand& command) const {
  const auto found = commands_.find(command.name);
  if (found == commands_.end()) {
    return absl::InternalError(absl::StrCat(
        "'", command.name, "': rank 0 announced a command that this rank does not have"));
  }
  absl::Status status = found->second(command);
  if (status.ok()) return status;
  return absl::Status(status.code(), absl::StrCat("'", command.name, "': ", status.message()));
}

}  // namespace tandem::ranks
