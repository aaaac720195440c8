#include "common/rpc/server/server_main.h"

#include <grpc/support/log.h>
#include <signal.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <thread>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "common/base/errors/error.h"
#include "common/base/errors/status_macros.h"
#include "common/base/logging.h"
#include "common/base/machine/freed_memory.h"
#include "common/base/machine/machine_resources.h"
#include "common/base/steady_time.h"
#include "common/config/config.h"
#include "common/rpc/client/channel.h"
#include "common/rpc/metrics/process_metrics.h"
#include "common/rpc/security/server_security.h"
#include "common/rpc/server/address.h"
#include "common/rpc/server/server.h"
#include "grpc/health/v1/health.grpc.pb.h"

namespace tandem::rpc {
namespace {

constexpr int kExitOk = 0;
constexpr int kExitFailure = 1;
constexpr int kExitBadConfig = 2;

// Beyond the drain deadline, for work that cannot be cancelled.
constexpr absl::Duration kExitGrace = absl::Seconds(5);
// Distance between the ports of two ranks: the default ports of the three servers lie next to each
// other.
constexpr int kPortsOfRank = 10;
// How often the main thread looks whether something is done, while it listens for signals.
constexpr absl::Duration kPoll = absl::Milliseconds(20);
constexpr absl::Duration kHealthTimeout = absl::Seconds(5);
// Seconds, turns of the main thread, between two looks at clients' certificates that may have
// expired.
constexpr int64_t kTurnsBetweenExpiries = 60;

// SIGTERM and SIGINT, taken synchronously by the main thread.
class Signals {
 public:
  // Before any thread starts: threads inherit the mask (a server's is early_signals.cc's already).
  Signals() {
    signal(SIGPIPE, SIG_IGN);
    sigemptyset(&set_);
    sigaddset(&set_, SIGTERM);
    sigaddset(&set_, SIGINT);
    pthread_sigmask(SIG_BLOCK, &set_, nullptr);
  }
  // True when a signal came within `timeout`.
  bool Wait(absl::Duration timeout) {
    const timespec limit = absl::ToTimespec(timeout);
    return sigtimedwait(&set_, nullptr, &limit) > 0;
  }

 private:
  sigset_t set_;
};

struct CommandLine {
  std::string config;
  std::vector<std::string> overrides;
  bool check_config = false;
  bool check_health = false;
  std::optional<int64_t> assumed_gpu_bytes;
  bool check_liveness = false;
  std::optional<std::string> config_check;  // the argument of the server's own flag
};

// Fills `line`, or returns the exit code of --help, --version and mistakes.
std::optional<int> ParseCommandLine(int argc, char** argv, const std::string& name,
                                    const ConfigCheck<>& config_check, CommandLine* line) {
  CLI::App app(absl::StrCat(name, ": one of the servers of Tandem Reinforcement Learning."), name);
  app.add_option("--config", line->config, "YAML configuration file")
      ->type_name("FILE")
      ->envname("TANDEM_CONFIG");
  app.add_option("overrides", line->overrides,
                 "dotted.key=value, applied in order after the file and after the environment "
                 "variables TANDEM__DOTTED__KEY=value")
      ->type_name("KEY=VALUE");
  CLI::Option* const check_config = app.add_flag("--check-config", line->check_config,
                                                 "Print the resolved configuration and exit");
  app.add_flag("--check-health", line->check_health,
               "Query the health of the running server of this configuration; exit 0 if SERVING")
      ->excludes(check_config);
  app.add_option("--assume-gpu-memory", line->assumed_gpu_bytes,
                 "With --check-config: plan for GPUs with so much free memory each, as 80GB or "
                 "74GiB, whatever this machine and this build have")
      ->type_name("SIZE")
      ->transform(CLI::AsSizeValue(/*kb_is_1000=*/true))
      ->needs(check_config);
  app.add_flag(
         "--check-liveness", line->check_liveness,
         "Like --check-health, but exit 0 if the server answers at all, even while it loads or "
         "saves to a slow disk")
      ->excludes(check_config);
  if (!config_check.flag.empty()) {
    app.add_option(config_check.flag, line->config_check, config_check.help)
        ->type_name("TEXT")
        ->needs(check_config);
  }
  app.footer(
      "Every setting: docs/reference/configuration.md. What to do about an error's [REASON]: "
      "docs/reference/errors.md.");
  app.set_version_flag("--version", absl::StrCat(name, " ", SoftwareVersion()));
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? kExitOk : kExitBadConfig;
  }
  return std::nullopt;
}

// NAME=value of each, by name, so that TANDEM__SERVER__HOST comes after TANDEM__SERVER.
std::vector<std::string> EnvironmentVariables() {
  std::vector<std::string> variables;
  for (char** variable = environ; *variable != nullptr; ++variable)
    variables.emplace_back(*variable);
  std::sort(variables.begin(), variables.end());
  return variables;
}

std::string GigabytesColumn(int64_t bytes) {
  return absl::StrFormat("%9.3f GB", static_cast<double>(bytes) / 1e9);
}

// The plan as comments below the configuration.
std::string MemoryComments(const MemoryPlan& plan, const FreeMemory& free) {
  std::string text = "# Memory that this configuration needs:\n";
  for (const MemoryPlan::Item& item : plan.items) {
    absl::StrAppend(&text, "#   ", GigabytesColumn(item.bytes), "  ", item.name,
                    item.on_host ? "" : " (on the device)", item.note.empty() ? "" : ": ",
                    item.note, "\n");
  }
  absl::StrAppend(&text, "#   ", GigabytesColumn(plan.total_bytes()), "  in all\n");
  if (free.host.has_value()) {
    absl::StrAppend(&text, "#   ", GigabytesColumn(*free.host),
                    "  available on this machine for a rank\n");
  }
  for (int device = 0; device < kDevicesOfRank; ++device) {
    const std::optional<int64_t>& bytes = free.devices[static_cast<size_t>(device)];
    if (!bytes.has_value() || plan.device_bytes(device) == 0) continue;
    // In another form than the lines above, which are of the host's memory or items of the plan.
    absl::StrAppendFormat(&text, "#   %s: %.3f GB needed, %.3f GB free\n",
                          device == 0 ? "GPU of a rank" : "the junior's GPU",
                          static_cast<double>(plan.device_bytes(device)) / 1e9,
                          static_cast<double>(*bytes) / 1e9);
  }
  return text;
}

// Logs gRPC's own lines at level debug: they are for those who debug gRPC (600 characters for a
// port in use).
void TakeGrpcLog() {
  gpr_set_log_function([](gpr_log_func_args* line) {
    Log(LogLevel::kDebug, "grpc_log",
        {{"severity", gpr_log_severity_string(line->severity)},
         {"file", line->file},
         {"line", line->line},
         {"message", line->message}});
  });
}

int StartFailed(const absl::Status& status, int exit_code) {
  Log(LogLevel::kError, "start_failed",
      {{"code", absl::StatusCodeToString(status.code())}, {"message", status.message()}});
  return exit_code;
}

// Fills `comments` with what the configuration needs, and returns it. Not OK when that is not
// known, or more than is free on the host or a GPU. With `assumed_gpu_bytes` no GPU is asked.
absl::StatusOr<MemoryPlan> CheckMemory(const ServerProgram& program,
                                       const RankEnvironment& environment,
                                       const std::optional<int64_t>& assumed_gpu_bytes,
                                       std::string* comments) {
  if (program.memory.plan == nullptr) return MemoryPlan();
  FreeMemory free;
  if (program.memory.measure_devices != nullptr) {
    TANDEM_RETURN_IF_ERROR(program.memory.measure_devices(assumed_gpu_bytes, free));
  }
  free.host = AvailableMemoryOfRank(environment);
  TANDEM_ASSIGN_OR_RETURN(MemoryPlan plan, program.memory.plan(free));
  if (assumed_gpu_bytes.has_value() && plan.device_bytes(0) == 0) {
    return absl::InvalidArgumentError(
        "--assume-gpu-memory: nothing in this configuration uses a GPU: set compute.device=cuda");
  }
  *comments = MemoryComments(plan, free);
  TANDEM_RETURN_IF_ERROR(CheckFits(plan, free));
  return plan;
}

// Runs `work` on a thread of its own, so that signals are heard, and asks `give_up` again and
// again. Returns false if that said yes: then `work` still runs, and the process has to end before
// `work` and what it names do.
bool RunUnless(absl::FunctionRef<bool()> give_up, absl::FunctionRef<void()> work) {
  const auto done = std::make_shared<std::atomic<bool>>(false);
  std::thread worker([done, work] {
    work();
    *done = true;
  });
  while (!*done) {
    if (give_up()) {
      worker.detach();
      return false;
    }
  }
  worker.join();
  return true;
}

// Ranks on one machine have ports of their own.
config::v1::ServerOptions OfRank(config::v1::ServerOptions options, int local_rank) {
  const int offset = kPortsOfRank * local_rank;
  if (options.grpc_port() != 0) options.set_grpc_port(options.grpc_port() + offset);
  if (options.metrics_port() != 0) options.set_metrics_port(options.metrics_port() + offset);
  return options;
}

// Ranks exchange weights and gradients in the clear.
absl::Status CheckRankNetwork(const config::v1::ServerOptions& options,
                              const RankEnvironment& environment) {
  if (environment.world_size <= environment.local_world_size || options.private_network()) {
    return absl::OkStatus();
  }
  return InvalidField("server.private_network",
                      absl::StrCat("the ", environment.world_size,
                                   " ranks are on several machines (LOCAL_WORLD_SIZE is ",
                                   environment.local_world_size,
                                   "), and their network is neither encrypted nor authenticated: "
                                   "set it to true if nobody else can reach that network"));
}

// Prints the health of a name of the server whose options these are; returns the exit code. Needs
// no token,
// and trusts whatever certificate the own address shows.
int CheckHealth(const config::v1::ServerOptions& options, const std::string& service) {
  ChannelOptions channel = ToChannelOptions(options, PeerIdentity::kOwnAddress);
  channel.token = nullptr;
  const auto stub = grpc::health::v1::Health::NewStub(MakeChannel(LocalAddress(options), channel));
  const auto context = MakeClientContext(SteadyTime::Now() + kHealthTimeout);
  grpc::health::v1::HealthCheckRequest request;
  request.set_service(service);
  grpc::health::v1::HealthCheckResponse response;
  const grpc::Status status = stub->Check(context.get(), request, &response);
  const bool serving =
      status.ok() && response.status() == grpc::health::v1::HealthCheckResponse::SERVING;
  if (status.ok()) {
    std::cout << grpc::health::v1::HealthCheckResponse::ServingStatus_Name(response.status())
              << std::endl;
  } else {
    std::cerr << status.error_message() << std::endl;
  }
  return serving ? kExitOk : kExitFailure;
}

// Whether Stop has state to save, or failed to save it.
bool MustSave(const ServerApp& app) { return app.SavesStateOnStop() && app.HasUnsavedState(); }

void WaitUntilAsked(ServerApp& app, Server& server, ServerSecurity& security, Signals& signals) {
  bool serving = true;
  FreedMemory freed_memory;
  int64_t turns = 0;
  while (!signals.Wait(absl::Seconds(1)) && !app.Ended()) {
    freed_memory.Look(SteadyTime::Now());
    // Certificates also expire.
    if (security.Refresh() || ++turns % kTurnsBetweenExpiries == 0) server.EndWithdrawn();
    const absl::Status health = CatchExceptions("health", [&] { return app.CheckHealth(); });
    if (health.ok() == serving) continue;
    serving = health.ok();
    server.SetServing(serving);
    Log(serving ? LogLevel::kInfo : LogLevel::kError, "health_changed",
        {{"serving", serving}, {"message", health.message()}});
  }
}

}  // namespace

std::string SoftwareVersion() { return TANDEM_VERSION; }

int RunServer(int argc, char** argv, const ServerProgram& program) {
  KeepFreedMemory();
  Signals signals;
  const std::string name = absl::StrCat("tandem-", program.role, "-server");
  CommandLine line;
  if (const auto code = ParseCommandLine(argc, argv, name, program.config_check, &line)) {
    return *code;
  }

  const absl::StatusOr<RankEnvironment> environment = ReadRankEnvironment();
  absl::Status status = environment.status();
  const config::Sources sources{
      .file = line.config, .variables = EnvironmentVariables(), .overrides = line.overrides};
  if (status.ok()) status = config::Load(sources, program.config);
  if (status.ok()) status = config::NameAsWritten(sources, program.resolve());
  if (line.check_config) {
    std::string comments;
    Metrics unused;
    if (status.ok()) status = ServerSecurity::Load(program.options(), unused).status();
    if (status.ok()) {
      status = config::NameAsWritten(
          sources, CheckMemory(program, *environment, line.assumed_gpu_bytes, &comments).status());
      std::cout << config::ToYaml(*program.config) << comments << std::flush;
    }
    if (status.ok() && line.config_check.has_value()) {
      const auto checked = program.config_check.check(*line.config_check);
      status = checked.status();
      if (checked.ok()) std::cout << *checked << std::endl;
    }
    if (status.ok()) return kExitOk;
    std::cerr << name << ": bad configuration: " << status.message();
    if (const auto reason = Reason(status)) std::cerr << " [" << *reason << "]";
    std::cerr << std::endl;
    return kExitBadConfig;
  }
  if (!status.ok()) return StartFailed(status, kExitBadConfig);

  const config::v1::ServerOptions options = OfRank(program.options(), environment->local_rank);
  SetLogLevel(config::LogLevelOf(options));
  TakeGrpcLog();
  if (line.check_health) return CheckHealth(options, "");
  if (line.check_liveness) return CheckHealth(options, kLivenessService);
  Metrics metrics;
  status = CheckRankNetwork(options, *environment);
  if (!status.ok()) return StartFailed(status, kExitBadConfig);
  const auto security = ServerSecurity::Load(options, metrics);
  if (!security.ok()) return StartFailed(security.status(), kExitBadConfig);
  const absl::Duration default_deadline = absl::Seconds(options.default_deadline_seconds());
  auto executor =
      std::make_unique<CallExecutor>(CallExecutorOptions{.default_deadline = default_deadline,
                                                         .streams = {.patience = default_deadline},
                                                         .access = &(*security)->access()});
  const SteadyTime start_time = SteadyTime::Now();
  metrics.Gauge(metric::kServerInfo, {program.role, SoftwareVersion()}).Set(1);
  metrics.Gauge(metric::kServerStart).Set(absl::ToDoubleSeconds(absl::Now() - absl::UnixEpoch()));
  metrics.Gauge(metric::kCallQueueCapacity).Set(static_cast<double>(executor->queue_capacity()));

  metrics.Gauge(metric::kServerRank).Set(environment->rank);
  metrics.Gauge(metric::kServerRanks).Set(environment->world_size);

  ServerRuntime runtime{.executor = *executor,
                        .metrics = metrics,
                        .start_time = start_time,
                        .environment = *environment,
                        .path_roots = PathRootsOf(options)};
  std::unique_ptr<ServerApp> app = program.create(runtime);
  absl::StatusOr<std::unique_ptr<Server>> server =
      Server::Start(options, app->services(), *executor, **security, &metrics);
  if (!server.ok()) return StartFailed(server.status(), kExitFailure);
  runtime.advertised_address = AdvertisedAddress(options, (*server)->grpc_port());
  Log(LogLevel::kInfo, "loading",
      {{"role", program.role},
       {"grpc_port", (*server)->grpc_port()},
       {"advertised_address", runtime.advertised_address},
       {"metrics_port", (*server)->metrics_port()}});
  const auto load = [&]() -> absl::Status {
    std::string comments;
    TANDEM_ASSIGN_OR_RETURN(
        runtime.memory,
        CheckMemory(program, *environment, /*assumed_gpu_bytes=*/std::nullopt, &comments));
    return app->Load();
  };
  const auto guarded_load = [&] { status = CatchExceptions("loading", load); };
  if (!RunUnless([&] { return signals.Wait(kPoll); }, guarded_load)) {
    Log(LogLevel::kInfo, "stopped", {{"message", "interrupted while loading"}});
    _exit(kExitOk);  // loading cannot be cancelled, and there is nothing to save
  }
  if (!status.ok()) return StartFailed(config::NameAsWritten(sources, status), kExitFailure);

  metrics.OnScrape([&app, &metrics, executor = executor.get()] {
    UpdateProcessMetrics(metrics);
    metrics.Gauge(metric::kCallQueueDepth).Set(static_cast<double>(executor->queue_size()));
    app->UpdateMetrics();
  });
  executor->SetGate(CallExecutor::Gate::kOpen);
  (*server)->SetServing(true);
  std::cout << nlohmann::ordered_json{{"event", "listening"},
                                      {"grpc_port", (*server)->grpc_port()},
                                      {"metrics_port", (*server)->metrics_port()}}
            << std::endl;
  Log(LogLevel::kInfo, "listening",
      {{"grpc_port", (*server)->grpc_port()},
       {"metrics_port", (*server)->metrics_port()},
       {"load_seconds", absl::ToDoubleSeconds(SteadyTime::Now() - start_time)}});

  WaitUntilAsked(*app, **server, **security, signals);

  const SteadyTime deadline = SteadyTime::Now() + absl::Seconds(options.drain_seconds());
  Log(LogLevel::kInfo, "draining",
      {{"live_calls", (*server)->live_calls()}, {"drain_seconds", options.drain_seconds()}});
  executor->SetGate(CallExecutor::Gate::kDraining);
  (*server)->SetServing(false);
  app->Drain(deadline);
  // A second signal ends the patience.
  while ((*server)->live_calls() > 0 && SteadyTime::Now() < deadline && !signals.Wait(kPoll)) {
  }
  const int64_t cancelled = (*server)->live_calls();
  int exit_code = kExitFailure;
  bool lost = false;
  const auto end = [&] {
    (*server)->Shutdown(SteadyTime::InfinitePast());
    metrics.OnScrape(nullptr);
    app->Stop();
    lost = app->HasUnsavedState();
    exit_code = MustSave(*app) ? kExitFailure : kExitOk;
    server->reset();
    executor.reset();
  };
  // State that has to be saved gets its time, behind whatever runs.
  const auto give_up = [&] {
    return signals.Wait(kPoll) || (SteadyTime::Now() > deadline + kExitGrace && !MustSave(*app));
  };
  if (!RunUnless(give_up, end)) {
    const bool failed = MustSave(*app);
    Log(failed ? LogLevel::kError : LogLevel::kWarning, "drain_abandoned",
        {{"message", "work that cannot be cancelled is still running"},
         {"unsaved_state_lost", app->HasUnsavedState()}});
    _exit(failed ? kExitFailure : kExitOk);
  }
  app.reset();
  Log(lost ? LogLevel::kWarning : LogLevel::kInfo, "stopped",
      {{"cancelled_calls", cancelled}, {"unsaved_state_lost", lost}});
  return exit_code;
}

}  // namespace tandem::rpc
