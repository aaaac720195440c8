// For tests: runs a function as the ranks of a group, every rank in a process of its own.
//
//   TEST(CommunicatorTest, …) {
//     RunOnRanks(4, [](const RankEnvironment& environment) {
//       const auto communicator = Communicator::Connect(environment, {.timeout = …}).value();
//       …EXPECT_EQ(…);
//     });
//   }
//
// A rank is a fork of the test, without an exec, so it starts at once. The test must not have
// started threads before, torch's pools among them: build tensors inside the body only.
#ifndef TANDEM_COMMON_RANKS_TESTING_RANK_PROCESSES_H_
#define TANDEM_COMMON_RANKS_TESTING_RANK_PROCESSES_H_

#include <c10/core/Device.h>
#include <sys/types.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "common/base/machine/rank_environment.h"
#include "common/ranks/communicator.h"

namespace tandem::ranks {

using RankBody = std::function<void(const RankEnvironment&)>;

// Runs `body` on every rank with one thread of torch and waits for all. A failed expectation, an
// exception or a crash of a rank fails the calling test with the name of the rank, and ends the
// others. No rank lives longer than `limit`.
void RunOnRanks(int world_size, const RankBody& body, absl::Duration limit = absl::Seconds(120));

// The device of a rank's tensors in tests: the CPU, or with TANDEM_TEST_DEVICE=cuda the current
// GPU.
at::Device DeviceOfTests();

// Runs `body` on ranks that are connected on DeviceOfTests(), and that leave together. The ranks
// take the GPUs in turn.
void RunConnected(int world_size,
                  const std::function<void(const std::shared_ptr<Communicator>& ranks)>& body);

// Rank processes that the test controls: for tests of processes that end or stop.
class RankProcesses {
 public:
  RankProcesses(int world_size, const RankBody& body, absl::Duration limit = absl::Seconds(120));
  // Kills the ranks that still run.
  ~RankProcesses();
  RankProcesses(const RankProcesses&) = delete;
  RankProcesses& operator=(const RankProcesses&) = delete;

  pid_t pid(int rank) const { return ranks_[rank].pid; }
  void Signal(int rank, int signal) const;
  // Waits for the rank and returns how it ended: "" for a body without failures, "exit code 1"
  // after a failed expectation or an exception, else "exit code 7" or "signal 9".
  std::string Wait(int rank);
  // As Wait, but returns false, with `how` empty, if the rank still runs.
  bool Ended(int rank, std::string* how);

 private:
  struct Rank {
    pid_t pid = -1;
    bool ended = false;
    std::string how;
  };
  void Reap(int rank, int flags);

  // A socket that is bound but does not listen: keeps the port from other programs.
  int port_holder_ = -1;
  std::vector<Rank> ranks_;
};

}  // namespace tandem::ranks

#endif  // TANDEM_COMMON_RANKS_TESTING_RANK_PROCESSES_H_
