#include "common/ranks/testing/rank_processes.h"

#include <ATen/Parallel.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"

namespace tandem::ranks {
namespace {

// Returns a socket that holds a free port. With SO_REUSEADDR here and in c10d, rank 0 can listen on
// the port while the system gives it to no other program.
int HoldFreePort(int* port) {
  const int holder = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const int yes = 1;
  setsockopt(holder, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes));
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_ANY);
  socklen_t length = sizeof(address);
  auto* generic = reinterpret_cast<sockaddr*>(&address);
  if (bind(holder, generic, length) != 0 || getsockname(holder, generic, &length) != 0) {
    ADD_FAILURE() << "no free port for the ranks";
  }
  *port = ntohs(address.sin_port);
  return holder;
}

// Runs a rank. Never returns: destructors and exit handlers belong to the test.
[[noreturn]] void RunRank(const RankEnvironment& environment, const RankBody& body,
                          absl::Duration limit) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  signal(SIGPIPE, SIG_IGN);  // as a server does: Gloo writes into closed connections
  alarm(static_cast<unsigned>(std::max<int64_t>(absl::ToInt64Seconds(limit), 1)));
  // c10d resolves the names of its peers' addresses, and a slow name server would delay every test.
  // With no attempts, none is asked.
  setenv("RES_OPTIONS", "attempts:0", 1);
  at::set_num_threads(1);
  {
    const testing::ScopedTrace trace(
        __FILE__, __LINE__,
        absl::StrCat("rank ", environment.rank, " of ", environment.world_size));
    try {
      body(environment);
    } catch (const std::exception& error) {
      ADD_FAILURE() << "exception: " << error.what();
    } catch (...) {
      ADD_FAILURE() << "exception of an unknown type";
    }
  }
  std::fflush(nullptr);
  std::_Exit(testing::Test::HasFailure() ? 1 : 0);
}

std::string HowItEnded(int status) {
  if (WIFSIGNALED(status)) {
    const int signal = WTERMSIG(status);
    return absl::StrCat("signal ", signal, signal == SIGALRM ? " (time limit)" : "");
  }
  const int code = WEXITSTATUS(status);
  return code == 0 ? "" : absl::StrCat("exit code ", code);
}

}  // namespace

RankProcesses::RankProcesses(int world_size, const RankBody& body, absl::Duration limit) {
  RankEnvironment environment;
  environment.world_size = world_size;
  port_holder_ = HoldFreePort(&environment.master_port);
  ranks_.resize(world_size);
  std::fflush(nullptr);  // or every rank would print the buffered output, too
  for (int rank = 0; rank < world_size; ++rank) {
    environment.rank = environment.local_rank = rank;
    ranks_[rank].pid = fork();
    if (ranks_[rank].pid == 0) RunRank(environment, body, limit);
    if (ranks_[rank].pid < 0) {
      ADD_FAILURE() << "rank " << rank << " cannot be forked";
      ranks_[rank].ended = true;
      ranks_[rank].how = "not started";
    }
  }
}

RankProcesses::~RankProcesses() {
  for (int rank = 0; rank < static_cast<int>(ranks_.size()); ++rank) {
    Signal(rank, SIGKILL);
    Wait(rank);
  }
  close(port_holder_);
}

void RankProcesses::Signal(int rank, int signal) const {
  if (!ranks_[rank].ended) kill(ranks_[rank].pid, signal);
}

void RankProcesses::Reap(int rank, int flags) {
  Rank& process = ranks_[rank];
  int status = 0;
  if (process.ended || waitpid(process.pid, &status, flags) != process.pid) return;
  process.ended = true;
  process.how = HowItEnded(status);
}

std::string RankProcesses::Wait(int rank) {
  Reap(rank, 0);
  return ranks_[rank].how;
}

bool RankProcesses::Ended(int rank, std::string* how) {
  Reap(rank, WNOHANG);
  *how = ranks_[rank].how;
  return ranks_[rank].ended;
}

void RunOnRanks(int world_size, const RankBody& body, absl::Duration limit) {
  RankProcesses processes(world_size, body, limit);
  for (bool running = true; running;) {
    running = false;
    for (int rank = 0; rank < world_size; ++rank) {
      std::string how;
      if (!processes.Ended(rank, &how)) {
        running = true;
      } else if (!how.empty()) {
        // The other ranks would wait for it.
        ADD_FAILURE() << "rank " << rank << " of " << world_size << " failed: " << how;
        return;
      }
    }
    if (running) absl::SleepFor(absl::Milliseconds(1));
  }
}

at::Device DeviceOfTests() {
  const char* const name = std::getenv("TANDEM_TEST_DEVICE");
  if (name == nullptr || std::strcmp(name, "cuda") != 0) return at::kCPU;
  return c10::impl::VirtualGuardImpl(at::kCUDA).getDevice();
}

void RunConnected(int world_size,
                  const std::function<void(const std::shared_ptr<Communicator>&)>& body) {
  RunOnRanks(world_size, [&](const RankEnvironment& environment) {
    if (!DeviceOfTests().is_cpu()) {
      const c10::impl::VirtualGuardImpl gpus(at::kCUDA);
      const int index = environment.rank % gpus.deviceCount();
      gpus.setDevice(at::Device(at::kCUDA, static_cast<at::DeviceIndex>(index)));
    }
    const auto ranks = Communicator::Connect(
        environment, {.device = DeviceOfTests(), .timeout = absl::Minutes(1)});
    ASSERT_TRUE(ranks.ok()) << ranks.status();
    body(*ranks);
    (*ranks)->Barrier();
  });
}

}  // namespace tandem::ranks
