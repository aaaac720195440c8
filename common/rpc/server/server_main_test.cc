// The life of a server process: command line, exit codes, the listening line, SIGTERM.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <mutex>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/base/steady_time.h"
#include "common/rpc/calls/error_table.h"
#include "common/rpc/testing/server.h"
#include "tandem/weights/v1/weights.grpc.pb.h"

namespace tandem::rpc {
namespace {

using testing::HasSubstr;
using weights::v1::GetVersionRequest;
using weights::v1::GetVersionResponse;
using weights::v1::WeightService;

// A child process with its two outputs.
class Process {
 public:
  explicit Process(const std::vector<std::string>& arguments,
                   const std::vector<std::pair<std::string, std::string>>& environment = {}) {
    int out[2], err[2];
    EXPECT_EQ(pipe2(out, O_CLOEXEC), 0);
    EXPECT_EQ(pipe2(err, O_CLOEXEC), 0);
    std::vector<char*> argv = {const_cast<char*>(TANDEM_TEST_SERVER)};
    for (const auto& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
    argv.push_back(nullptr);
    pid_ = fork();
    if (pid_ == 0) {
      for (const auto& [name, value] : environment) setenv(name.c_str(), value.c_str(), 1);
      dup2(out[1], 1);
      dup2(err[1], 2);
      execv(TANDEM_TEST_SERVER, argv.data());
      _exit(127);
    }
    close(out[1]);
    close(err[1]);
    out_ = out[0];
    err_ = err[0];
    // Nobody may block on a full pipe.
    err_reader_ = std::thread([this] {
      char buffer[4096];
      for (ssize_t n; (n = read(err_, buffer, sizeof(buffer))) > 0;) {
        std::lock_guard lock(mutex_);
        err_text_.append(buffer, static_cast<size_t>(n));
      }
    });
  }
  ~Process() {
    if (!exit_code_.has_value()) {
      kill(pid_, SIGKILL);
      Wait();
    }
    err_reader_.join();
    close(out_);
    close(err_);
  }
  // Returns the next line of stdout, or what there is of it after 20 s.
  std::string ReadLine() {
    std::string line;
    pollfd waiting{out_, POLLIN, 0};
    char c = 0;
    while (poll(&waiting, 1, 20000) > 0 && read(out_, &c, 1) == 1 && c != '\n') line += c;
    return line;
  }
  std::string ReadAll() {
    std::string text;
    char buffer[4096];
    for (ssize_t n; (n = read(out_, buffer, sizeof(buffer))) > 0;) {
      text.append(buffer, static_cast<size_t>(n));
    }
    return text;
  }
  // Returns true once stderr holds `text`, false after 20 s.
  bool WaitForStderr(const std::string& text) {
    for (int i = 0; i < 2000; ++i) {
      {
        std::lock_guard lock(mutex_);
        if (err_text_.find(text) != std::string::npos) return true;
      }
      absl::SleepFor(absl::Milliseconds(10));
    }
    return false;
  }
  std::string StderrSoFar() {
    std::lock_guard lock(mutex_);
    return err_text_;
  }
  void Signal(int number) { kill(pid_, number); }
  int Wait() {
    int status = 0;
    waitpid(pid_, &status, 0);
    exit_code_ = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    return *exit_code_;
  }
  // Returns the whole of stderr. Must be called after Wait.
  std::string Stderr() {
    if (err_reader_.joinable()) err_reader_.join();
    err_reader_ = std::thread([] {});
    return err_text_;
  }

 private:
  pid_t pid_ = -1;
  int out_ = -1;
  int err_ = -1;
  std::thread err_reader_;
  std::mutex mutex_;
  std::string err_text_;
  std::optional<int> exit_code_;
};

const std::vector<std::string> kAnyPort = {"senior_model=m", "server.grpc_port=0",
                                           "server.metrics_port=0"};

std::vector<std::string> With(std::vector<std::string> arguments,
                              const std::vector<std::string>& more) {
  arguments.insert(arguments.end(), more.begin(), more.end());
  return arguments;
}

TEST(ServerMainTest, VersionAndHelpExitZero) {
  Process version({"--version"});
  EXPECT_THAT(version.ReadAll(), HasSubstr("tandem-rollout-server 0."));
  EXPECT_EQ(version.Wait(), 0);
  Process help({"--help"});
  EXPECT_THAT(help.ReadAll(), HasSubstr("--check-config"));
  EXPECT_EQ(help.Wait(), 0);
}

TEST(ServerMainTest, CheckConfigPrintsTheResolvedConfig) {
  const std::string path = testing::TempDir() + "/server_main_test.yaml";
  std::ofstream(path) << "senior_model: a\nmax_queue: 5\n";
  Process process({"--config", path, "--check-config", "max_queue=6", "tandem.prob_senior=0.25"});
  const std::string yaml = process.ReadAll();
  EXPECT_EQ(process.Wait(), 0);
  EXPECT_THAT(yaml, HasSubstr("max_queue: 6\n"));
  EXPECT_THAT(yaml, HasSubstr("prob_senior: 0.25\n"));
  EXPECT_THAT(yaml, HasSubstr("grpc_port: 7701\n"));
}

TEST(ServerMainTest, EnvironmentVariablesAreSettings) {
  const std::string path = testing::TempDir() + "/server_main_variables.yaml";
  std::ofstream(path) << "senior_model: a\nmax_queue: 5\nmax_num_seqs: 5\n";
  Process process({"--check-config", "max_num_seqs=7"}, {{"TANDEM_CONFIG", path},
                                                         {"TANDEM__MAX_QUEUE", "6"},
                                                         {"TANDEM__MAX_NUM_SEQS", "6"},
                                                         {"TANDEM__SERVER__GRPC_PORT", "7801"}});
  const std::string yaml = process.ReadAll();
  EXPECT_EQ(process.Wait(), 0);
  EXPECT_THAT(yaml, HasSubstr("max_queue: 6\n"));
  EXPECT_THAT(yaml, HasSubstr("max_num_seqs: 7\n"));
  EXPECT_THAT(yaml, HasSubstr("grpc_port: 7801\n"));
  Process unknown({"--check-config", "senior_model=a"}, {{"TANDEM__MAX_QUEU", "6"}});
  EXPECT_EQ(unknown.Wait(), 2);
  EXPECT_THAT(unknown.Stderr(), HasSubstr("TANDEM__MAX_QUEU: max_queu: unknown key"));
}

TEST(ServerMainTest, CheckConfigTellsTheMemoryAsComments) {
  Process process({"senior_model=a", "--check-config"}, {{"MEMORY_BYTES", "2500000"}});
  const std::string yaml = process.ReadAll();
  EXPECT_EQ(process.Wait(), 0);
  EXPECT_THAT(yaml, HasSubstr("0.003 GB  weights\n"));
  EXPECT_THAT(yaml, HasSubstr("GB  in all\n"));
}

TEST(ServerMainTest, WhatCannotFitIsRefused) {
  const char* const too_much = "1000000000000000";
  Process checked({"senior_model=a", "--check-config"}, {{"MEMORY_BYTES", too_much}});
  EXPECT_EQ(checked.Wait(), 2);
  Process started(kAnyPort, {{"MEMORY_BYTES", too_much}});
  EXPECT_EQ(started.Wait(), 1);
}

TEST(ServerMainTest, AGpuIsAskedForItsMemoryOrAssumed) {
  const std::vector<std::string> on_gpu = {"senior_model=a", "compute.device=cuda",
                                           "--check-config"};
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.begin(), on_gpu.begin(), on_gpu.end());
    return more;
  };
  Process none(on_gpu);
  EXPECT_EQ(none.Wait(), 2);
  EXPECT_THAT(none.Stderr(), HasSubstr("compute.device: no GPU"));
  Process asked(on_gpu, {{"MEMORY_BYTES", "3000000"}, {"FREE_GPU_BYTES", "4000000"}});
  const std::string yaml = asked.ReadAll();
  EXPECT_EQ(asked.Wait(), 0);
  EXPECT_THAT(yaml, HasSubstr("0.003 GB  weights (on the device): a GPU has 4000000\n"));
  EXPECT_THAT(yaml, HasSubstr("GPU of a rank: 0.003 GB needed, 0.004 GB free\n"));
  Process full(on_gpu, {{"MEMORY_BYTES", "3000000"}, {"FREE_GPU_BYTES", "2000000"}});
  EXPECT_EQ(full.Wait(), 2);
  EXPECT_THAT(full.Stderr(), HasSubstr("of the GPU's memory (weights"));
  // An assumed GPU is not asked for.
  for (const auto& [size, bytes] :
       {std::pair{"80GB", "80000000000"}, {"2GiB", "2147483648"}, {"4000000", "4000000"}}) {
    Process assumed(with({"--assume-gpu-memory", size}), {{"MEMORY_BYTES", "3000000"}});
    const std::string text = assumed.ReadAll();
    EXPECT_EQ(assumed.Wait(), 0) << size;
    EXPECT_THAT(text, HasSubstr(absl::StrCat("a GPU has ", bytes, "\n")));
  }
  Process too_small(with({"--assume-gpu-memory", "2MB"}), {{"MEMORY_BYTES", "3000000"}});
  EXPECT_EQ(too_small.Wait(), 2);
  EXPECT_THAT(too_small.Stderr(), HasSubstr("of the GPU's memory"));
}

TEST(ServerMainTest, AnAssumedGpuMustBeOneThatTheConfigurationUses) {
  Process on_cpu({"senior_model=a", "--check-config", "--assume-gpu-memory", "80GB"});
  EXPECT_EQ(on_cpu.Wait(), 2);
  EXPECT_THAT(on_cpu.Stderr(), HasSubstr("--assume-gpu-memory: nothing in this configuration"));
  Process starts({"senior_model=a", "--assume-gpu-memory", "80GB"});
  EXPECT_EQ(starts.Wait(), 2);
  Process no_size({"senior_model=a", "--check-config", "--assume-gpu-memory", "much"});
  EXPECT_EQ(no_size.Wait(), 2);
}

TEST(ServerMainTest, BadConfigurationExitsTwo) {
  for (const std::vector<std::string>& arguments :
       std::vector<std::vector<std::string>>{{"senior_modl=x"},
                                             {"max_queue=many", "senior_model=x"},
                                             {},
                                             {"--config", "/no/such/file.yaml"},
                                             {"--no-such-flag"}}) {
    Process process(arguments);
    EXPECT_EQ(process.Wait(), 2) << testing::PrintToString(arguments);
    EXPECT_FALSE(process.Stderr().empty());
  }
  Process checked({"senior_modl=x", "--check-config"});
  EXPECT_EQ(checked.Wait(), 2);
  EXPECT_THAT(checked.Stderr(),
              HasSubstr("tandem-rollout-server: bad configuration: senior_modl: unknown key"));
}

// Returns the only line on stderr, parsed.
nlohmann::json OnlyLine(Process& process) {
  const std::string text = process.Stderr();
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 1) << text;
  return nlohmann::json::parse(text, nullptr, false);
}

TEST(ServerMainTest, AStartThatFailsSaysWhyInOneLine) {
  Process bad_config({"senior_modl=x"});
  EXPECT_EQ(bad_config.Wait(), 2);
  nlohmann::json line = OnlyLine(bad_config);
  EXPECT_EQ(line["event"], "start_failed");
  EXPECT_EQ(line["code"], "INVALID_ARGUMENT");
  EXPECT_THAT(std::string(line["message"]), HasSubstr("senior_modl: unknown key; did you mean"));

  Process first(kAnyPort);
  const auto ports = nlohmann::json::parse(first.ReadLine(), nullptr, false);
  ASSERT_FALSE(ports.is_discarded());
  for (const char* port : {"grpc_port", "metrics_port"}) {
    Process second(With(kAnyPort, {absl::StrCat("server.", port, "=", ports[port].get<int>())}));
    EXPECT_EQ(second.Wait(), 1);
    line = OnlyLine(second);
    EXPECT_EQ(line["event"], "start_failed");
    EXPECT_EQ(line["code"], "UNAVAILABLE");
    const std::string message = line["message"];
    EXPECT_THAT(message, HasSubstr("is the port in use?"));
    EXPECT_THAT(message, HasSubstr(port));
    EXPECT_LT(message.size(), 150);
  }
}

TEST(ServerMainTest, ServesAndExitsZeroOnSigterm) {
  Process process(kAnyPort);
  const auto line = nlohmann::json::parse(process.ReadLine(), nullptr, false);
  ASSERT_FALSE(line.is_discarded());
  EXPECT_EQ(line["event"], "listening");
  EXPECT_GT(line["metrics_port"].get<int>(), 0);
  const auto stub =
      WeightService::NewStub(TestChannel(absl::StrCat("127.0.0.1:", line["grpc_port"].get<int>())));
  GetVersionResponse response;
  EXPECT_TRUE(stub->GetVersion(MakeClientContext(SteadyTime::Now() + absl::Seconds(20)).get(),
                               GetVersionRequest(), &response)
                  .ok());
  process.Signal(SIGTERM);
  EXPECT_EQ(process.Wait(), 0);
  // Every log line is one JSON object.
  std::istringstream lines(process.Stderr());
  int count = 0;
  for (std::string text; std::getline(lines, text); ++count) {
    EXPECT_TRUE(nlohmann::json::accept(text)) << text;
  }
  EXPECT_GT(count, 2);
}

// Sends SIGTERM while a call runs, and sets `status` to how the call ended.
void SigtermInACall(Process& process, absl::Status& status) {
  const auto line = nlohmann::json::parse(process.ReadLine(), nullptr, false);
  ASSERT_FALSE(line.is_discarded());
  const auto stub =
      WeightService::NewStub(TestChannel(absl::StrCat("127.0.0.1:", line["grpc_port"].get<int>())));
  std::thread client([&] {
    GetVersionResponse response;
    status = FromGrpcStatus(
        stub->GetVersion(MakeClientContext(SteadyTime::Now() + absl::Seconds(20)).get(),
                         GetVersionRequest(), &response));
  });
  EXPECT_EQ(process.ReadLine(), "call started");
  process.Signal(SIGTERM);
  client.join();
}

TEST(ServerMainTest, CheckHealthAsksTheRunningServer) {
  Process server(kAnyPort);
  const auto listening = nlohmann::json::parse(server.ReadLine());
  const std::string port = absl::StrCat("server.grpc_port=", listening["grpc_port"].get<int>());
  {
    Process probe({"--check-health", "senior_model=m", port});
    EXPECT_EQ(probe.ReadAll(), "SERVING\n");
    EXPECT_EQ(probe.Wait(), 0);
  }
  server.Signal(SIGTERM);
  EXPECT_EQ(server.Wait(), 0);
  Process probe({"--check-health", "senior_model=m", port});
  EXPECT_EQ(probe.Wait(), 1);
  EXPECT_THAT(probe.Stderr(), HasSubstr("127.0.0.1"));
}

TEST(ServerMainTest, AServerThatLoadsIsAliveAndNotReady) {
  Process server(kAnyPort, {{"LOAD_MS", "60000"}});
  ASSERT_TRUE(server.WaitForStderr("\"event\":\"loading\""));
  const std::string log = server.StderrSoFar();
  const auto line = nlohmann::json::parse(log.substr(log.rfind('{', log.find("\"loading\""))));
  Process probe({"--check-health", "senior_model=m",
                 absl::StrCat("server.grpc_port=", line["grpc_port"].get<int>())});
  EXPECT_EQ(probe.ReadAll(), "NOT_SERVING\n");
  EXPECT_EQ(probe.Wait(), 1);
  Process liveness({"--check-liveness", "senior_model=m",
                    absl::StrCat("server.grpc_port=", line["grpc_port"].get<int>())});
  EXPECT_EQ(liveness.ReadAll(), "SERVING\n");
  EXPECT_EQ(liveness.Wait(), 0);
}

TEST(ServerMainTest, RanksOnSeveralMachinesNeedAPrivateNetwork) {
  const std::vector<std::pair<std::string, std::string>> ranks = {{"RANK", "0"},
                                                                  {"WORLD_SIZE", "2"},
                                                                  {"LOCAL_WORLD_SIZE", "1"},
                                                                  {"MASTER_ADDR", "127.0.0.1"},
                                                                  {"MASTER_PORT", "29500"}};
  Process refused(kAnyPort, ranks);
  EXPECT_EQ(refused.Wait(), 2);
  EXPECT_THAT(refused.Stderr(), HasSubstr("server.private_network: the 2 ranks"));
  Process allowed(With(kAnyPort, {"server.private_network=true"}), ranks);
  EXPECT_THAT(allowed.ReadLine(), HasSubstr("listening"));
}

TEST(ServerMainTest, ABadTokenFileExitsTwoAndNamesTheSetting) {
  Process process(With(kAnyPort, {"server.tokens.admin_file=/missing"}));
  EXPECT_EQ(process.Wait(), 2);
  EXPECT_THAT(process.Stderr(), HasSubstr("server.tokens.admin_file: /missing: cannot be read"));
}

TEST(ServerMainTest, SigtermLetsARunningCallFinish) {
  Process process(kAnyPort, {{"CALL_MS", "500"}});
  absl::Status status;
  ASSERT_NO_FATAL_FAILURE(SigtermInACall(process, status));
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_EQ(process.Wait(), 0);
}

TEST(ServerMainTest, TheDrainDeadlineCancelsWhatIsLeft) {
  Process process(With(kAnyPort, {"server.drain_seconds=0.1"}), {{"CALL_MS", "2000"}});
  absl::Status status;
  ASSERT_NO_FATAL_FAILURE(SigtermInACall(process, status));
  EXPECT_FALSE(status.ok());
  EXPECT_EQ(process.Wait(), 0);
}

// The drain time and its grace are over long before the state is saved.
TEST(ServerMainTest, UnsavedStateIsWaitedFor) {
  Process process(With(kAnyPort, {"server.drain_seconds=0.1"}), {{"SAVE_MS", "7000"}});
  process.ReadLine();
  process.Signal(SIGTERM);
  EXPECT_EQ(process.ReadLine(), "stopping");
  EXPECT_EQ(process.ReadLine(), "saved");
  EXPECT_EQ(process.Wait(), 0);
}

TEST(ServerMainTest, WorkWithoutUnsavedStateIsAbandoned) {
  Process process(With(kAnyPort, {"server.drain_seconds=0.1"}), {{"STOP_MS", "60000"}});
  process.ReadLine();
  process.Signal(SIGTERM);
  EXPECT_EQ(process.Wait(), 0);
  EXPECT_THAT(process.Stderr(), HasSubstr("drain_abandoned"));
}

TEST(ServerMainTest, StateThatCannotBeSavedExitsOne) {
  Process process(kAnyPort, {{"SAVE_MS", "1"}, {"SAVE_FAILS", "1"}});
  process.ReadLine();
  process.Signal(SIGTERM);
  EXPECT_EQ(process.Wait(), 1);
  EXPECT_THAT(process.Stderr(), HasSubstr("\"unsaved_state_lost\":true"));
}

TEST(ServerMainTest, StateThatNobodyAsksToSaveIsReportedAsLost) {
  Process process(kAnyPort, {{"UNSAVED", "1"}});
  process.ReadLine();
  process.Signal(SIGTERM);
  EXPECT_EQ(process.Wait(), 0);
  EXPECT_THAT(process.Stderr(), HasSubstr("\"unsaved_state_lost\":true"));
}

TEST(ServerMainTest, ASecondSignalEndsTheSavingAndExitsOne) {
  Process process(kAnyPort, {{"SAVE_MS", "60000"}});
  process.ReadLine();
  process.Signal(SIGTERM);
  EXPECT_EQ(process.ReadLine(), "stopping");
  process.Signal(SIGTERM);
  EXPECT_EQ(process.Wait(), 1);
  EXPECT_THAT(process.Stderr(), HasSubstr("drain_abandoned"));
}

TEST(ServerMainTest, SigtermBeforeMainExitsZero) {
  Process process(kAnyPort, {{"START_MS", "300"}});
  EXPECT_EQ(process.ReadLine(), "starting");
  process.Signal(SIGTERM);
  EXPECT_EQ(process.Wait(), 0);
}

TEST(ServerMainTest, SigtermWhileLoadingExitsZero) {
  Process process(kAnyPort, {{"LOAD_MS", "60000"}});
  ASSERT_TRUE(process.WaitForStderr("\"event\":\"loading\""));
  process.Signal(SIGTERM);
  EXPECT_EQ(process.Wait(), 0);
}

TEST(ServerMainTest, AModelThatDoesNotLoadExitsOne) {
  Process process(kAnyPort, {{"LOAD_FAILS", "1"}});
  EXPECT_EQ(process.Wait(), 1);
  EXPECT_THAT(process.Stderr(), HasSubstr("no such model"));
}

}  // namespace
}  // namespace tandem::rpc
