#include "common/ranks/monitor/rank_monitor.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "common/ranks/testing/rank_processes.h"

namespace tandem::ranks {
namespace {

using ::testing::AllOf;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::StartsWith;

// heartbeats_test holds the laws about time. These tests hold what takes processes and a store;
// each waits for one silence at most.
constexpr int kRanks = 3;
// Far longer than a process of a busy machine waits for a core.
constexpr absl::Duration kSilence = absl::Seconds(2);
// The longest life of a rank.
constexpr absl::Duration kLimit = absl::Seconds(60);

// Pipes through which ranks send lines to the test.
class Lines {
 public:
  explicit Lines(int ranks) : pipes_(ranks) {
    for (auto& pipe_ends : pipes_) EXPECT_EQ(pipe(pipe_ends.data()), 0);
  }
  ~Lines() {
    for (const auto& pipe_ends : pipes_) {
      close(pipe_ends[0]);
      close(pipe_ends[1]);
    }
  }

  void Write(int rank, const std::string& text) const {
    const std::string line = text + "\n";
    EXPECT_EQ(write(pipes_[rank][1], line.data(), line.size()), static_cast<ssize_t>(line.size()));
  }
  // Waits for the line as long as a rank may live.
  std::string Read(int rank) const {
    std::string line;
    while (true) {
      pollfd ready = {.fd = pipes_[rank][0], .events = POLLIN, .revents = 0};
      if (poll(&ready, 1, static_cast<int>(absl::ToInt64Milliseconds(kLimit))) != 1) {
        return absl::StrCat(line, " (no line in time)");
      }
      char next = 0;
      if (read(ready.fd, &next, 1) != 1 || next == '\n') return line;
      line += next;
    }
  }

 private:
  std::vector<std::array<int, 2>> pipes_;
};

RankMonitorOptions Reporting(const Lines& lines, int rank) {
  RankMonitorOptions options;
  options.silence = kSilence;
  options.on_failure = [&lines, rank](const std::string& failure) {
    lines.Write(rank, failure);
    std::_Exit(0);
  };
  return options;
}

std::unique_ptr<RankMonitor> StartMonitor(const RankEnvironment& environment, const Lines& lines) {
  auto monitor = RankMonitor::Start(environment, Reporting(lines, environment.rank));
  if (!monitor.ok()) {
    lines.Write(environment.rank, std::string(monitor.status().message()));
    std::_Exit(2);
  }
  return *std::move(monitor);
}

// Runs `body` on all ranks, each with a monitor of its own.
RankProcesses MonitoredRanks(const Lines& lines,
                             const std::function<void(int rank, RankMonitor& monitor)>& body) {
  return RankProcesses(
      kRanks,
      [&](const RankEnvironment& environment) {
        const auto monitor = StartMonitor(environment, lines);
        body(environment.rank, *monitor);
      },
      kLimit);
}

// Waits until every rank has read a beat of all others.
void BeatForAWhile() { absl::SleepFor(kSilence / 2); }

// Expects that all other ranks report the lost one alike.
void ExpectOthersReport(RankProcesses& processes, const Lines& lines, int lost,
                        const std::string& what) {
  for (int rank = 0; rank < kRanks; ++rank) {
    if (rank == lost) continue;
    EXPECT_THAT(
        lines.Read(rank),
        AllOf(StartsWith(absl::StrCat("rank ", lost, " (pid ", processes.pid(lost), " on ")),
              HasSubstr(what)));
    EXPECT_EQ(processes.Wait(rank), "");
  }
}

class KilledRankTest : public testing::TestWithParam<int> {};

INSTANTIATE_TEST_SUITE_P(Ranks, KilledRankTest, testing::Values(0, 1));

TEST_P(KilledRankTest, IsReportedByTheOthers) {
  const Lines lines(kRanks);
  RankProcesses processes = MonitoredRanks(lines, [&](int rank, RankMonitor&) {
    BeatForAWhile();
    lines.Write(rank, "watched");
    absl::SleepFor(kLimit / 2);
    lines.Write(rank, "noticed nothing");
  });
  for (int rank = 0; rank < kRanks; ++rank) EXPECT_EQ(lines.Read(rank), "watched");
  processes.Signal(GetParam(), SIGKILL);
  ExpectOthersReport(
      processes, lines, GetParam(),
      GetParam() == 0 ? "the host of the store at 127.0.0.1:" : "has been silent for 2s");
}

class LeavingRankTest : public testing::TestWithParam<int> {};

INSTANTIATE_TEST_SUITE_P(Ranks, LeavingRankTest, testing::Values(0, 2));

TEST_P(LeavingRankTest, TheOthersReportItsFailureInItsWords) {
  const Lines lines(kRanks);
  RankProcesses processes = MonitoredRanks(lines, [&](int rank, RankMonitor& monitor) {
    if (rank == GetParam()) {
      monitor.Fail("out of memory");
      std::_Exit(7);
    }
    absl::SleepFor(kLimit / 2);
    lines.Write(rank, "noticed nothing");
  });
  EXPECT_EQ(processes.Wait(GetParam()), "exit code 7");
  for (int rank = 0; rank < kRanks; ++rank) {
    if (rank == GetParam()) continue;
    EXPECT_EQ(lines.Read(rank), absl::StrCat("rank ", GetParam(), ": out of memory"));
  }
}

TEST_P(LeavingRankTest, ARankThatLeavesIsNotMissed) {
  const Lines lines(kRanks);
  RankProcesses processes = MonitoredRanks(lines, [&](int rank, RankMonitor& monitor) {
    if (rank == GetParam()) {
      monitor.Leave();
      std::_Exit(0);
    }
    BeatForAWhile();  // reads the last record; then the store is gone
    monitor.Leave();
    lines.Write(rank, "noticed nothing");
  });
  for (int rank = 0; rank < kRanks; ++rank) {
    if (rank != GetParam()) {
      EXPECT_EQ(lines.Read(rank), "noticed nothing");
    }
    EXPECT_EQ(processes.Wait(rank), "");
  }
}

TEST(RankMonitorTest, AMonitorDestroyedWithoutLeaveIsMissed) {
  const Lines lines(2);
  RankProcesses processes(
      2,
      [&](const RankEnvironment& environment) {
        {
          const auto monitor = StartMonitor(environment, lines);
          BeatForAWhile();
          if (environment.rank == 0) absl::SleepFor(kLimit / 2);
        }
        lines.Write(environment.rank, "destroyed");
      },
      kLimit);
  EXPECT_EQ(lines.Read(1), "destroyed");
  EXPECT_THAT(lines.Read(0), AllOf(StartsWith("rank 1 (pid"), HasSubstr("silent for 2s")));
}

// A read from the store blocks, and nothing can end it. The failure is reported all the same, once,
// and the monitor can be destroyed.
TEST(RankMonitorTest, AStoppedHostIsReportedOnce) {
  const Lines lines(2);
  RankProcesses processes(
      2,
      [&](const RankEnvironment& environment) {
        RankMonitorOptions options = Reporting(lines, environment.rank);
        std::promise<void> reported;
        options.on_failure = [&](const std::string& failure) {
          lines.Write(environment.rank, failure);
          reported.set_value();  // a second call would throw
        };
        auto monitor = RankMonitor::Start(environment, options);
        ASSERT_TRUE(monitor.ok()) << monitor.status();
        BeatForAWhile();
        lines.Write(environment.rank, "watched");
        reported.get_future().wait();
        absl::SleepFor(kSilence / 2);  // two quarters, in which it could be reported again
        monitor->reset();
        lines.Write(environment.rank, "destroyed");
      },
      kLimit);
  EXPECT_EQ(lines.Read(0), "watched");
  EXPECT_EQ(lines.Read(1), "watched");
  processes.Signal(0, SIGSTOP);
  EXPECT_THAT(lines.Read(1), AllOf(StartsWith("rank 0 (pid"), EndsWith("has been silent for 2s")));
  EXPECT_EQ(lines.Read(1), "destroyed");
  EXPECT_EQ(processes.Wait(1), "");
}

TEST(RankMonitorTest, TheDefaultEndsTheProcess) {
  RankProcesses processes(
      2,
      [](const RankEnvironment& environment) {
        RankMonitorOptions options;
        options.silence = kSilence;
        auto monitor = RankMonitor::Start(environment, options);
        ASSERT_TRUE(monitor.ok()) << monitor.status();
        if (environment.rank == 0) {
          (*monitor)->Fail("on purpose");
          std::_Exit(0);
        }
        absl::SleepFor(kLimit / 2);
        std::_Exit(3);
      },
      kLimit);
  EXPECT_EQ(processes.Wait(0), "");
  EXPECT_EQ(processes.Wait(1), "exit code 1");
}

TEST(RankMonitorTest, AStoreThatIsNotThereIsUnavailable) {
  RunOnRanks(2, [](const RankEnvironment& environment) {
    if (environment.rank == 0) return;
    const auto monitor = RankMonitor::Start(environment, {.silence = absl::Milliseconds(100)});
    EXPECT_EQ(monitor.status().code(), absl::StatusCode::kUnavailable);
    EXPECT_THAT(std::string(monitor.status().message()),
                HasSubstr(absl::StrCat("127.0.0.1:", environment.master_port)));
  });
}

TEST(RankMonitorTest, AWorldOfOneWatchesNoRank) {
  const auto monitor = RankMonitor::Start({}, {});
  ASSERT_TRUE(monitor.ok());
  (*monitor)->Leave();
  (*monitor)->Fail("nobody hears it");
}

}  // namespace
}  // namespace tandem::ranks
