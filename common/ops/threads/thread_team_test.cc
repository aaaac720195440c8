#include "common/ops/threads/thread_team.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

namespace tandem::ops {
namespace {

TEST(ThreadTeamTest, DoesEveryPartOnce) {
  ThreadTeam team;
  for (const int64_t parts : {0, 1, 2, 7, 1000}) {
    for (const int threads : {1, 2, 5}) {
      std::vector<std::atomic<int>> visits(static_cast<size_t>(parts));
      team.Run(parts, threads, [&](int64_t part) { ++visits[static_cast<size_t>(part)]; });
      for (const std::atomic<int>& count : visits) EXPECT_EQ(count, 1);
    }
  }
}

// The writes of a loop's parts are seen behind the loop, and by the next loop's parts.
TEST(ThreadTeamTest, LoopsFollowEachOther) {
  ThreadTeam team;
  std::vector<int64_t> values(16, 0), next(16);
  for (int64_t round = 1; round <= 20'000; ++round) {
    team.Run(16, 3, [&](int64_t part) {
      const auto i = static_cast<size_t>(part);
      next[i] = values[15 - i] + 1;
    });
    std::swap(values, next);
    ASSERT_EQ(values, std::vector<int64_t>(16, round));
  }
}

TEST(ThreadTeamTest, WakesMembersThatSleep) {
  ThreadTeam team;
  for (int round = 0; round < 3; ++round) {
    // The first part ends once another thread has begun the second one.
    std::atomic<int> begun = 0;
    team.Run(2, 2, [&](int64_t) {
      ++begun;
      while (begun < 2) std::this_thread::yield();
    });
    EXPECT_EQ(begun, 2);
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

TEST(ThreadTeamTest, ALoopInsideALoopRunsOnItsThread) {
  ThreadTeam team;
  std::atomic<int> parts = 0;
  team.Run(4, 2, [&](int64_t) {
    const std::thread::id outer = std::this_thread::get_id();
    team.Run(4, 2, [&](int64_t) {
      EXPECT_EQ(std::this_thread::get_id(), outer);
      ++parts;
    });
  });
  EXPECT_EQ(parts, 16);
}

TEST(ThreadTeamTest, ACallerThatFindsTheTeamInUseWorksAlone) {
  ThreadTeam team;
  std::atomic<bool> begun = false, ends = false;
  std::thread other([&] {
    team.Run(2, 2, [&](int64_t) {
      begun = true;
      while (!ends) std::this_thread::yield();
    });
  });
  while (!begun) std::this_thread::yield();
  int parts = 0;
  const std::thread::id self = std::this_thread::get_id();
  team.Run(8, 2, [&](int64_t) {
    EXPECT_EQ(std::this_thread::get_id(), self);
    ++parts;
  });
  EXPECT_EQ(parts, 8);
  ends = true;
  other.join();
}

TEST(ThreadTeamTest, RethrowsAndGoesOn) {
  ThreadTeam team;
  std::atomic<int> parts = 0;
  const auto work = [&](int64_t part) {
    ++parts;
    if (part == 3) throw std::runtime_error("part 3");
  };
  EXPECT_THROW(team.Run(8, 2, work), std::runtime_error);
  parts = 0;
  team.Run(2, 2, [&](int64_t) { ++parts; });
  EXPECT_EQ(parts, 2);
}

}  // namespace
}  // namespace tandem::ops
