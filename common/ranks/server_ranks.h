// The ranks of one server: processes that join each other at the start, execute the same commands,
// and end together. Engines begin here; beneath it are communicator.h (collectives),
// rank_agreement.h (one result on all ranks), command_table.h (commands) and rank_monitor.h
// (heartbeats).
#ifndef TANDEM_COMMON_RANKS_SERVER_RANKS_H_
#define TANDEM_COMMON_RANKS_SERVER_RANKS_H_

#include <c10/core/Device.h>

#include <memory>
#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "common/base/machine/rank_environment.h"
#include "common/base/struct_bytes.h"
#include "common/ranks/command_table.h"
#include "common/ranks/communicator.h"
#include "common/ranks/monitor/rank_monitor.h"
#include "common/ranks/monitor/rank_timeouts.h"
#include "common/ranks/rank_agreement.h"

namespace tandem::ranks {

struct ServerRanksOptions {
  RankEnvironment environment = {};
  at::Device device = at::kCPU;  // of the tensors that the ranks exchange
  RankTimeouts timeouts;
};

// A lost rank, a failed collective and Fail end the process on all ranks
// (RankMonitorOptions::EndProcess). Methods are for one thread at a time and may throw c10::Error.
// In a world of one rank nothing is sent, and nothing costs anything.
class ServerRanks {
 public:
  // Returns when all ranks have joined. UNAVAILABLE as Communicator::Connect.
  static absl::StatusOr<std::shared_ptr<ServerRanks>> Connect(const ServerRanksOptions& options);
  // Leaves the world: the other ranks do not take this one for lost.
  ~ServerRanks();
  ServerRanks(const ServerRanks&) = delete;
  ServerRanks& operator=(const ServerRanks&) = delete;

  int rank() const { return world_->rank(); }
  int size() const { return world_->size(); }
  bool leads() const { return rank() == 0; }

  // The process group of all ranks, on the options' device.
  const std::shared_ptr<Communicator>& world() const { return world_; }

  // Rank 0: announces the command that all ranks execute now. Its request is a struct
  // (common/base/struct_bytes.h).
  template <typename Request>
  void Announce(const std::string& name, const std::string& request_id, const Request& request) {
    if (size() == 1) return;
    Send({.name = name, .request_id = request_id, .request = ToBytes(request)});
  }
  // Rank 0: announces that there are no more commands.
  void AnnounceEnd() {
    if (size() > 1) Send({});
  }

  // The other ranks: executes the commands that rank 0 announces, however far apart, until it
  // announces the end. `run` calls `execute`, which looks the command up in `commands`, on the
  // thread where the engine executes commands. An error that `run` returns, or throws, ends the
  // process on all ranks: an unknown command, or this rank's inability to go on.
  using RunCommand = absl::FunctionRef<absl::Status(const std::string& request_id,
                                                    absl::FunctionRef<absl::Status()> execute)>;
  void Follow(const CommandTable& commands, RunCommand run);

  // Returns the same status on every rank: OK if all are, else the error of the lowest rank that
  // has one, with its rank.
  absl::Status Agree(const absl::Status& status) { return AgreeByName(*commands_, status); }
  // Runs `compute` on rank 0 alone, however long, and returns its result on every rank.
  template <typename T>
  absl::StatusOr<T> FromRankZero(absl::FunctionRef<absl::StatusOr<T>()> compute) {
    return ranks::FromRankZero<T>(*commands_, compute);
  }

  // Checks that every rank has the same text. FAILED_PRECONDITION, on all ranks, names the first
  // rank that differs from rank 0, and the first line: "rank 2 has another <what>: …".
  absl::Status CheckSame(absl::string_view what, const std::string& text);

  // As RankMonitor::progress_of_others. Thread-safe.
  int64_t progress_of_others() const { return monitor_->progress_of_others(); }

  // Ends the process on all ranks.
  [[noreturn]] void Fail(const std::string& message);

 private:
  ServerRanks() = default;
  void Send(const RankCommand& command);
  RankCommand Receive();

  std::shared_ptr<RankMonitor> monitor_;
  std::shared_ptr<Communicator> world_;
  std::shared_ptr<Communicator> commands_;  // all ranks, on the host, without a time limit
};

}  // namespace tandem::ranks

#endif  // TANDEM_COMMON_RANKS_SERVER_RANKS_H_
