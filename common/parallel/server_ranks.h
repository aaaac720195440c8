// The processes of one server. Rank 0 is told what to do; it tells the others, which do the same.
#ifndef TANDEM_COMMON_PARALLEL_SERVER_RANKS_H_
#define TANDEM_COMMON_PARALLEL_SERVER_RANKS_H_

#include <c10/core/Device.h>

#include <memory>
#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "common/base/rank_environment.h"
#include "common/base/struct_bytes.h"
#include "common/parallel/communicator.h"
#include "common/parallel/rank_agreement.h"
#include "common/parallel/rank_monitor.h"
#include "common/parallel/rank_timeouts.h"

namespace tandem::parallel {

struct ServerRanksOptions {
  RankEnvironment environment;
  at::Device device = at::kCPU;  // of the tensors that the ranks exchange
  RankTimeouts timeouts = {};
};

// A rank that is lost, a collective that fails, and Fail end the process on all ranks
// (RankMonitorOptions::EndProcess). Its methods are for one thread at a time; they may throw
// c10::Error. In a world of one there is nobody to talk to, and nothing costs anything.
class ServerRanks {
 public:
  // Returns when all ranks are there. UNAVAILABLE as Communicator::Connect.
  static absl::StatusOr<std::shared_ptr<ServerRanks>> Connect(const ServerRanksOptions& options);
  // Leaves: the silence to come is no failure.
  ~ServerRanks();
  ServerRanks(const ServerRanks&) = delete;
  ServerRanks& operator=(const ServerRanks&) = delete;

  int rank() const { return world_->rank(); }
  int size() const { return world_->size(); }
  bool leads() const { return rank() == 0; }

  // Of all ranks, on the device.
  const std::shared_ptr<Communicator>& world() const { return world_; }

  struct Command {
    std::string name;        // empty: there are no more
    std::string request_id;  // of the call, for logs
    std::string request;     // the bytes of a struct
  };
  // Rank 0: what all do now.
  void Announce(const Command& command);
  // The others: waits for it, however long.
  Command Await();

  // The same status on every rank: OK if all are, else that of the lowest rank that has an error,
  // which it names.
  absl::Status Agree(const absl::Status& status) { return AgreeByName(*commands_, status); }
  // What `compute` returns on rank 0, where alone it runs, however long.
  template <typename T>
  absl::StatusOr<T> FromRankZero(absl::FunctionRef<absl::StatusOr<T>()> compute) {
    return parallel::FromRankZero<T>(*commands_, compute);
  }

  // Whether every rank has the same text; FAILED_PRECONDITION, on all of them, with the first line
  // in which one differs from rank 0: "rank 2 has another <what>: …".
  absl::Status CheckSame(absl::string_view what, const std::string& text);

  // Ends the process on all ranks.
  [[noreturn]] void Fail(const std::string& message);

 private:
  ServerRanks() = default;

  std::shared_ptr<RankMonitor> monitor_;
  std::shared_ptr<Communicator> world_;
  std::shared_ptr<Communicator> commands_;  // on the host, without a time limit
};

}  // namespace tandem::parallel

#endif  // TANDEM_COMMON_PARALLEL_SERVER_RANKS_H_
