#include "common/parallel/server_ranks.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <csignal>
#include <memory>
#include <string>

#include "absl/strings/match.h"
#include "absl/time/clock.h"
#include "common/base/error.h"
#include "common/parallel/testing/rank_processes.h"

namespace tandem::parallel {
namespace {

constexpr absl::Duration kSilence = absl::Seconds(2);

std::shared_ptr<ServerRanks> Connect(const RankEnvironment& environment) {
  return ServerRanks::Connect({.environment = environment, .timeouts = {.silence = kSilence}})
      .value();
}

TEST(ServerRanksTest, EveryRankGetsTheCommandsInTheirOrder) {
  RunOnRanks(3, [](const RankEnvironment& environment) {
    const auto ranks = Connect(environment);
    EXPECT_EQ(ranks->rank(), environment.rank);
    EXPECT_EQ(ranks->size(), 3);
    for (const std::string& request : std::vector<std::string>{"", "1", {"\0\xff", 2}}) {
      if (ranks->leads()) {
        ranks->Announce({.name = "step", .request_id = "call", .request = request});
        continue;
      }
      const ServerRanks::Command command = ranks->Await();
      EXPECT_EQ(command.name, "step");
      EXPECT_EQ(command.request_id, "call");
      EXPECT_EQ(command.request, request);
    }
  });
}

TEST(ServerRanksTest, AnErrorNamesItsRank) {
  RunOnRanks(3, [](const RankEnvironment& environment) {
    const auto ranks = Connect(environment);
    EXPECT_TRUE(ranks->Agree(absl::OkStatus()).ok());
    const absl::Status own = environment.rank == 0 ? absl::OkStatus() : InvalidField("x", "no");
    const absl::Status status = ranks->Agree(own);
    EXPECT_EQ(status.message(), "rank 1: x: no");
    EXPECT_EQ(FieldPath(status), "x");
  });
}

TEST(ServerRanksTest, WhatDiffersIsNamedOnEveryRank) {
  RunOnRanks(3, [](const RankEnvironment& environment) {
    const auto ranks = Connect(environment);
    EXPECT_TRUE(ranks->CheckSame("model", "a").ok());
    const absl::Status status = ranks->CheckSame(
        "configuration", environment.rank == 2 ? "model: a\nlr: 0.1" : "model: a\nlr: 0.2");
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_EQ(status.message(),
              "rank 2 has another configuration: 'lr: 0.1', where rank 0 has 'lr: 0.2'");
    EXPECT_EQ(ranks->CheckSame("text", environment.rank == 1 ? "" : "a").message(),
              "rank 1 has another text: '', where rank 0 has 'a'");
  });
}

// How all ranks end when `body` does something bad on one of them.
void ExpectThatAllEnd(const std::function<void(ServerRanks& ranks)>& body) {
  RankProcesses processes(
      3,
      [&](const RankEnvironment& environment) {
        const auto ranks = Connect(environment);
        body(*ranks);
        if (environment.rank != 0) ranks->Await();  // for ever
        pause();
      },
      absl::Seconds(60));
  for (int rank = 0; rank < 3; ++rank) {
    const std::string how = processes.Wait(rank);
    EXPECT_TRUE(how == "exit code 1" || how == "signal 9") << rank << ": " << how;
  }
}

TEST(ServerRanksTest, ARankThatFailsEndsAll) {
  ExpectThatAllEnd([](ServerRanks& ranks) {
    if (ranks.rank() == 1) ranks.Fail("lost its way");
  });
}

TEST(ServerRanksTest, ALostRankEndsTheOthersWhoWaitForACommand) {
  ExpectThatAllEnd([](ServerRanks& ranks) {
    if (ranks.rank() == 1) raise(SIGKILL);
  });
}

TEST(ServerRanksTest, ALostRankEndsTheOthersInACollective) {
  ExpectThatAllEnd([](ServerRanks& ranks) {
    if (ranks.rank() == 0) raise(SIGKILL);
    at::Tensor tensor = at::ones({1000});
    ranks.world()->AllReduce(tensor, Reduction::kSum);
  });
}

TEST(ServerRanksTest, ARankWithoutConnectionsEndsAll) {
  for (const int victim : {0, 2}) {
    ExpectThatAllEnd([victim](ServerRanks& ranks) {
      if (ranks.rank() != victim) return;
      for (int descriptor = 3; descriptor < 256; ++descriptor) {
        sockaddr_storage peer;
        socklen_t length = sizeof(peer);
        const bool connected =
            getpeername(descriptor, reinterpret_cast<sockaddr*>(&peer), &length) == 0;
        if (connected) shutdown(descriptor, SHUT_RDWR);
      }
    });
  }
}

TEST(ServerRanksTest, AWorldOfOneAsksNobody) {
  RunOnRanks(1, [](const RankEnvironment&) {
    const auto ranks = ServerRanks::Connect({}).value();
    EXPECT_TRUE(ranks->leads());
    ranks->Announce({.name = "step", .request_id = "", .request = ""});
    EXPECT_EQ(ranks->Agree(absl::InternalError("own")).message(), "own");
    EXPECT_EQ(ranks->FromRankZero<int64_t>([] { return absl::StatusOr<int64_t>(7); }).value(), 7);
    EXPECT_EQ(ranks->world()->volume().bytes(), 0);
  });
}

}  // namespace
}  // namespace tandem::parallel
