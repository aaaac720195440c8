// For tests: runs a piece of code as the ranks of a group, every rank in a process of its own.
//
//   TEST(CommunicatorTest, …) {
//     RunOnRanks(4, [](const RankEnvironment& environment) {
//       const auto communicator = Communicator::Connect(environment, {}).value();
//       …EXPECT_EQ(…);
//     });
//   }
//
// A rank is a fork of the test, without an exec, so it starts at once. The test itself must not
// have started threads before, torch's pools among them: build tensors inside the body only.
#ifndef TANDEM_COMMON_PARALLEL_TESTING_RANK_PROCESSES_H_
#define TANDEM_COMMON_PARALLEL_TESTING_RANK_PROCESSES_H_

#include <sys/types.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "common/base/rank_environment.h"
#include "common/parallel/communicator.h"

namespace tandem::parallel {

using RankBody = std::function<void(const RankEnvironment&)>;

// Runs `body` on every rank with one thread of torch and waits for all. A failed expectation, an
// exception or a crash of a rank fails the calling test with the name of the rank, and ends the
// others. No rank lives longer than `limit`.
void RunOnRanks(int world_size, const RankBody& body, absl::Duration limit = absl::Seconds(120));

// The same with all ranks connected, which leave together.
void RunConnected(int world_size,
                  const std::function<void(const std::shared_ptr<Communicator>& ranks)>& body);

// The same under control of the test: for what is about processes that end or stop.
class RankProcesses {
 public:
  RankProcesses(int world_size, const RankBody& body, absl::Duration limit = absl::Seconds(120));
  // Kills what still runs.
  ~RankProcesses();
  RankProcesses(const RankProcesses&) = delete;
  RankProcesses& operator=(const RankProcesses&) = delete;

  pid_t pid(int rank) const { return ranks_[rank].pid; }
  void Signal(int rank, int signal) const;
  // How the rank ended: "" for a body without failures, "exit code 1" after a failed expectation
  // or an exception, else "exit code 7" or "signal 9". Waits for it.
  std::string Wait(int rank);
  // The same, "" and false if the rank still runs.
  bool Ended(int rank, std::string* how);

 private:
  struct Rank {
    pid_t pid = -1;
    bool ended = false;
    std::string how;
  };
  void Reap(int rank, int flags);

  // Bound, not listening: keeps the port from others until the end.
  int port_holder_ = -1;
  std::vector<Rank> ranks_;
};

}  // namespace tandem::parallel

#endif  // TANDEM_COMMON_PARALLEL_TESTING_RANK_PROCESSES_H_
