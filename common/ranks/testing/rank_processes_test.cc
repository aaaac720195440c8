#include "common/ranks/testing/rank_processes.h"

#include <ATen/Parallel.h>
#include <gtest/gtest-spi.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <stdexcept>

namespace tandem::ranks {
namespace {

TEST(RankProcessesTest, EveryRankRunsOnceWithItsEnvironment) {
  void* shared = mmap(nullptr, sizeof(std::atomic<int>), PROT_READ | PROT_WRITE,
                      MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(shared, MAP_FAILED);
  auto* ranks = new (shared) std::atomic<int>(0);
  const pid_t parent = getpid();
  RunOnRanks(3, [&](const RankEnvironment& environment) {
    EXPECT_NE(getpid(), parent);
    EXPECT_EQ(environment.world_size, 3);
    EXPECT_EQ(environment.local_rank, environment.rank);
    EXPECT_GT(environment.master_port, 0);
    EXPECT_EQ(at::get_num_threads(), 1);
    *ranks += 1 << (4 * environment.rank);
  });
  EXPECT_EQ(ranks->load(), 0x111);
  munmap(shared, sizeof(std::atomic<int>));
}

// The ranks print these failures; they do not fail this test.
TEST(RankProcessesTest, AFailedExpectationOrAnExceptionIsAnExitCode) {
  RankProcesses processes(3, [](const RankEnvironment& environment) {
    EXPECT_NE(environment.rank, 1) << "(on purpose)";
    if (environment.rank == 2) throw std::runtime_error("(on purpose)");
  });
  EXPECT_EQ(processes.Wait(0), "");
  EXPECT_EQ(processes.Wait(1), "exit code 1");
  EXPECT_EQ(processes.Wait(2), "exit code 1");
}

TEST(RankProcessesTest, ARankThatEndsBadlyFailsTheTestAndEndsTheOthers) {
  EXPECT_NONFATAL_FAILURE(RunOnRanks(3,
                                     [](const RankEnvironment& environment) {
                                       if (environment.rank == 1) raise(SIGKILL);
                                       pause();
                                     }),
                          "rank 1 of 3 failed: signal 9");
}

TEST(RankProcessesTest, TheTimeLimitFailsTheTest) {
  EXPECT_NONFATAL_FAILURE(
      RunOnRanks(
          1, [](const RankEnvironment& /*environment*/) { pause(); }, absl::Seconds(1)),
      "rank 0 of 1 failed: signal 14 (time limit)");
}

}  // namespace
}  // namespace tandem::ranks
