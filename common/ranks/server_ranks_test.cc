#include "common/ranks/server_ranks.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <csignal>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "common/base/errors/error.h"
#include "common/base/struct_bytes.h"
#include "common/ranks/testing/rank_processes.h"

namespace tandem::ranks {
namespace {

constexpr absl::Duration kSilence = absl::Seconds(2);

std::shared_ptr<ServerRanks> Connect(const RankEnvironment& environment) {
  return ServerRanks::Connect({.environment = environment,
                               .timeouts = {.collective = absl::Minutes(1), .silence = kSilence}})
      .value();
}

struct StepRequest {
  int64_t step = 0;
  std::string text;
};

absl::Status RunHere(const std::string&, absl::FunctionRef<absl::Status()> execute) {
  return execute();
}

TEST(ServerRanksTest, EveryRankExecutesTheCommandsInTheirOrder) {
  RunOnRanks(3, [](const RankEnvironment& environment) {
    const auto ranks = Connect(environment);
    EXPECT_EQ(ranks->rank(), environment.rank);
    EXPECT_EQ(ranks->size(), 3);
    const std::vector<std::string> texts = {"", "1", {"\0\xff", 2}};
    if (ranks->leads()) {
      for (int64_t step = 0; step < 3; ++step) {
        ranks->Announce("step", absl::StrCat("call ", step),
                        StepRequest{.step = step, .text = texts[static_cast<size_t>(step)]});
        ranks->Announce("save", "", step);
      }
      ranks->AnnounceEnd();
      return;
    }
    std::vector<std::string> done;
    CommandTable commands;
    commands.Add<StepRequest>("step", [&](const std::string& call, const StepRequest& request) {
      EXPECT_EQ(request.text, texts[static_cast<size_t>(request.step)]);
      done.push_back(call);
      return absl::OkStatus();
    });
    commands.Add<int64_t>("save", [&](const std::string& call, const int64_t& step) {
      EXPECT_EQ(call, "");
      done.push_back(absl::StrCat("save ", step));
      return absl::OkStatus();
    });
    ranks->Follow(commands, RunHere);
    EXPECT_EQ(absl::StrJoin(done, ", "), "call 0, save 0, call 1, save 1, call 2, save 2");
  });
}

TEST(CommandTableTest, AnUnknownCommandOrRequestIsAnError) {
  CommandTable commands;
  commands.Add<int64_t>("step", [](const std::string&, const int64_t& step) {
    return step == 7 ? absl::DataLossError("lost") : absl::OkStatus();
  });
  EXPECT_TRUE(
      commands.Run({.name = "step", .request_id = "", .request = ToBytes(int64_t{1})}).ok());
  EXPECT_EQ(commands.Run({.name = "step", .request_id = "", .request = ToBytes(int64_t{7})}),
            absl::DataLossError("'step': lost"));
  const absl::Status unknown = commands.Run({.name = "stop", .request_id = "", .request = ""});
  EXPECT_EQ(unknown.code(), absl::StatusCode::kInternal);
  EXPECT_EQ(unknown.message(), "'stop': rank 0 announced a command that this rank does not have");
  const absl::Status short_request =
      commands.Run({.name = "step", .request_id = "", .request = "x"});
  EXPECT_FALSE(short_request.ok());
  EXPECT_TRUE(absl::StartsWith(short_request.message(), "'step': ")) << short_request;
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

TEST(ServerRanksTest, ADifferenceIsNamedOnEveryRank) {
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

// Expects that every rank ends, with exit code 1 or killed, after `body`.
void ExpectThatAllEnd(const std::function<void(ServerRanks& ranks)>& body) {
  RankProcesses processes(
      3,
      [&](const RankEnvironment& environment) {
        const auto ranks = Connect(environment);
        body(*ranks);
        if (environment.rank != 0) ranks->Follow({}, RunHere);  // until this process is ended
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

TEST(ServerRanksTest, AnUnknownCommandEndsAll) {
  ExpectThatAllEnd([](ServerRanks& ranks) {
    if (ranks.leads()) ranks.Announce("nonsense", "", int64_t{0});
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

TEST(ServerRanksTest, AWorldOfOneSendsNothing) {
  RunOnRanks(1, [](const RankEnvironment&) {
    const auto ranks = ServerRanks::Connect({}).value();
    EXPECT_TRUE(ranks->leads());
    ranks->Announce("step", "", int64_t{0});
    ranks->AnnounceEnd();
    EXPECT_EQ(ranks->Agree(absl::InternalError("own")).message(), "own");
    EXPECT_EQ(ranks->FromRankZero<int64_t>([] { return absl::StatusOr<int64_t>(7); }).value(), 7);
    EXPECT_EQ(ranks->world()->volume().bytes(), 0);
  });
}

}  // namespace
}  // namespace tandem::ranks
