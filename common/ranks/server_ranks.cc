#include "common/ranks/server_ranks.h"

#include <algorithm>
#include <numeric>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "common/base/errors/status_macros.h"
#include "common/tensor/aten/catch_torch_errors.h"

namespace tandem::ranks {
namespace {

// Returns the first line that differs: "'a: 1', where rank 0 has 'a: 2'".
std::string FirstDifference(absl::string_view theirs, absl::string_view of_rank_zero) {
  const std::vector<absl::string_view> a = absl::StrSplit(theirs, '\n');
  const std::vector<absl::string_view> b = absl::StrSplit(of_rank_zero, '\n');
  const auto [at_a, at_b] = std::mismatch(a.begin(), a.end(), b.begin(), b.end());
  const auto line = [](auto at, auto end) {
    return at == end ? "nothing" : absl::StrCat("'", *at, "'");
  };
  return absl::StrCat(line(at_a, a.end()), ", where rank 0 has ", line(at_b, b.end()));
}

}  // namespace

absl::StatusOr<std::shared_ptr<ServerRanks>> ServerRanks::Connect(
    const ServerRanksOptions& options) {
  std::shared_ptr<ServerRanks> ranks(new ServerRanks);
  TANDEM_ASSIGN_OR_RETURN(
      ranks->world_,
      Communicator::Connect(options.environment,
                            {.device = options.device, .timeout = options.timeouts.collective}));
  TANDEM_ASSIGN_OR_RETURN(
      ranks->monitor_,
      RankMonitor::Start(options.environment, {.silence = options.timeouts.silence}));
  ranks->world_->SetFailureHandler(
      [monitor = ranks->monitor_, silence = options.timeouts.silence](const std::string& failure) {
        // If a lost rank is the cause, the monitor finds it in this time and ends the process.
        absl::SleepFor(2 * silence);
        monitor->Fail(failure);
        RankMonitorOptions::EndProcess(failure);
      });
  TANDEM_RETURN_IF_ERROR(CatchTorchErrors("ranks", [&]() -> absl::Status {
    // Commands may be hours apart. The monitor ends the process if a rank is lost meanwhile.
    std::vector<int> all(static_cast<size_t>(ranks->size()));
    std::iota(all.begin(), all.end(), 0);
    ranks->commands_ =
        ranks->world_->Split("commands", {all}, {.device = at::kCPU, .timeout = kNoTimeLimit});
    ranks->world_->patient();  // while all ranks are here
    return absl::OkStatus();
  }));
  return ranks;
}

ServerRanks::~ServerRanks() {
  if (monitor_ != nullptr) monitor_->Leave();
}

void ServerRanks::Send(const RankCommand& command) {
  commands_->BroadcastBytes(ToBytes(command), 0);
}

RankCommand ServerRanks::Receive() {
  absl::StatusOr<RankCommand> command = FromBytes<RankCommand>(commands_->BroadcastBytes("", 0));
  TORCH_CHECK(command.ok(), command.status().message());
  return *std::move(command);
}

void ServerRanks::Follow(const CommandTable& commands, RunCommand run) {
  for (;;) {
    bool ended = false;
    const absl::Status status = CatchTorchErrors("command", [&]() -> absl::Status {
      const RankCommand command = Receive();
      ended = command.name.empty();
      if (ended) return absl::OkStatus();
      return run(command.request_id, [&] { return commands.Run(command); });
    });
    if (!status.ok()) Fail(std::string(status.message()));
    if (ended) return;
  }
}

absl::Status ServerRanks::CheckSame(absl::string_view what, const std::string& text) {
  const std::vector<std::string> all = commands_->AllGatherBytes(text);
  for (size_t rank = 1; rank < all.size(); ++rank) {
    if (all[rank] == all[0]) continue;
    return absl::FailedPreconditionError(absl::StrCat("rank ", rank, " has another ", what, ": ",
                                                      FirstDifference(all[rank], all[0])));
  }
  return absl::OkStatus();
}

void ServerRanks::Fail(const std::string& message) {
  monitor_->Fail(message);
  RankMonitorOptions::EndProcess(message);
}

}  // namespace tandem::ranks
