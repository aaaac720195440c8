// The life of a server process: command line, configuration, loading, serving, draining.
//
//   int main(int argc, char** argv) {
//     return tandem::rpc::ServerMain<tandem::config::v1::CriticServerConfig>(
//         argc, argv, "critic", [](const auto& config, tandem::rpc::ServerRuntime& runtime) {
//           return std::make_unique<tandem::critic::CriticApp>(config, runtime);
//         });
//   }
//
// A multi-rank server runs one process per rank, configured by torchrun's environment variables
// (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, …). Local rank r listens on the configured ports
// + 10 r.
//
// Command line: --config FILE, [dotted.key=value …], --check-config, --version, --help. The
// environment variable TANDEM_CONFIG stands for --config, and TANDEM__DOTTED__KEY for settings
// between those of the file and those of the command line.
// A start that fails says why in one line of JSON on stderr, {"event":"start_failed","code":…,
// "message":…}, the last it writes. --check-config prints the resolved configuration and, as YAML
// comments, its memory requirement. It exits with 2 if the configuration is invalid or needs more
// memory than this machine has; a server that starts checks the memory while it loads.
// --assume-gpu-memory SIZE plans for GPUs that this machine or this build does not have. A server
// may add a flag for something else that it checks.
//
// Exit codes: 0 on success and after SIGTERM or SIGINT (work that outlasts the drain time is given
// up, and the log says so; state that has to be saved is waited for), 2 for a bad configuration or
// command line, 1 for anything else, such as state that could not be saved. A signal that comes
// before the loader has run the program's first code, within some 20 ms, ends the process itself.
#ifndef TANDEM_COMMON_RPC_SERVER_SERVER_MAIN_H_
#define TANDEM_COMMON_RPC_SERVER_SERVER_MAIN_H_

#include <google/protobuf/message.h>

#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/base/errors/status_macros.h"
#include "common/base/files/paths/path_roots.h"
#include "common/base/machine/memory_plan.h"
#include "common/base/machine/rank_environment.h"
#include "common/base/steady_time.h"
#include "common/config/server_config.h"
#include "common/rpc/calls/call_executor.h"
#include "common/rpc/metrics/metrics.h"
#include "common/rpc/server/server.h"

namespace tandem::rpc {

// The services of the skeleton that an app uses.
struct ServerRuntime {
  CallExecutor& executor;  // the app's services give it to HandleUnary and its relatives
  Metrics& metrics;
  SteadyTime start_time;
  // Where other servers reach this one (address.h); known once the ports are bound, before Load.
  std::string advertised_address = {};
  RankEnvironment environment = {};  // this process among the ranks of its server
  PathRoots path_roots = {};         // where clients may name paths
  MemoryPlan memory = {};            // what it was started with; known before Load
};

// One server's application: its services and its engine. Order of calls: constructor, services
// (before loading: the gate of the executor answers UNAVAILABLE), Load, then CheckHealth and
// UpdateMetrics now and then, Drain, Stop, destructor.
class ServerApp {
 public:
  virtual ~ServerApp() = default;

  virtual std::vector<NamedService> services() = 0;

  // Loads the model; blocks. Handlers run only after it returned OK.
  virtual absl::Status Load() = 0;

  // Not OK: health turns NOT_SERVING until it is OK again. Must be quick.
  virtual absl::Status CheckHealth() { return absl::OkStatus(); }

  // Refreshes gauges; called before a scrape, after Load. Must be quick.
  virtual void UpdateMetrics() {}

  // The gate is kDraining. Ends idle streams and refuses new work at once, without blocking; what
  // runs may finish until `deadline`, when every call that is left is cancelled.
  virtual void Drain(SteadyTime deadline) { (void)deadline; }

  // No call is left, but a worker may still be busy for one that was cancelled: makes what blocks
  // in the engine return soon. Saves what has to be saved, however long that takes. The engine
  // itself goes with the destructor.
  virtual void Stop() {}

  // Whether this rank has nothing to do any more: it stops as if it had been told to. After Load.
  virtual bool Ended() const { return false; }

  // Whether the process holds state that is lost when it ends. After Load, from any thread.
  virtual bool HasUnsavedState() const { return false; }
  // Whether Stop saves that state; the exit code is 1 if it could not.
  virtual bool SavesStateOnStop() const { return false; }
};

// A flag with an argument that a server adds to --check-config.
template <typename... Config>
struct ConfigCheck {
  std::string flag;  // "--check-objective"; empty: none
  std::string help;
  // After resolve: what to print below the configuration. An error makes the configuration invalid.
  std::function<absl::StatusOr<std::string>(const Config&..., const std::string& argument)> check;
};

// What a server knows about the memory that its configuration needs.
template <typename... Config>
struct MemoryPlanner {
  // After resolve: fills free.devices with what is free on the GPUs that the configuration uses, or
  // as if each had `assumed` bytes. Errors name the field, such as compute.device where there is
  // none.
  std::function<absl::Status(const Config&..., const std::optional<int64_t>& assumed,
                             FreeMemory& free)>
      measure_devices;
  // After resolve: what the configuration needs where that is free. Errors name the field, such as
  // a model that cannot be read. Null for a server without a model.
  std::function<absl::StatusOr<MemoryPlan>(const Config&..., const FreeMemory& free)> plan;
};

// One server program.
struct ServerProgram {
  std::string role;                   // "rollout"; the binary is tandem-<role>-server
  google::protobuf::Message* config;  // filled from file and overrides
  std::function<absl::Status()> resolve;
  std::function<config::v1::ServerOptions()> options;  // after resolve
  MemoryPlanner<> memory;
  ConfigCheck<> config_check;
  std::function<std::unique_ptr<ServerApp>(ServerRuntime&)> create;
};

// Runs the program until SIGTERM or SIGINT; returns the exit code. A second signal cancels running
// calls at once; one that comes while the server saves, or ends, ends the process at once.
int RunServer(int argc, char** argv, const ServerProgram& program);

// The same for a config message that has a config::Resolve.
template <typename Config>
int ServerMain(
    int argc, char** argv, const std::string& role,
    std::function<std::unique_ptr<ServerApp>(const Config& config, ServerRuntime& runtime)> create,
    MemoryPlanner<std::type_identity_t<Config>> memory = {},
    ConfigCheck<std::type_identity_t<Config>> config_check = {}) {
  Config config;
  MemoryPlanner<> planner;
  if (memory.plan != nullptr) {
    planner.plan = [&](const FreeMemory& free) { return memory.plan(config, free); };
  }
  if (memory.measure_devices != nullptr) {
    planner.measure_devices = [&](const std::optional<int64_t>& assumed, FreeMemory& free) {
      return memory.measure_devices(config, assumed, free);
    };
  }
  return RunServer(argc, argv,
                   ServerProgram{
                       .role = role,
                       .config = &config,
                       .resolve = [&config] { return config::Resolve(&config); },
                       .options = [&config] { return config.server(); },
                       .memory = std::move(planner),
                       .config_check = {.flag = config_check.flag,
                                        .help = config_check.help,
                                        .check =
                                            [&](const std::string& argument) {
                                              return config_check.check(config, argument);
                                            }},
                       .create = [&](ServerRuntime& runtime) { return create(config, runtime); },
                   });
}

// "0.1.0", from the build.
std::string SoftwareVersion();

}  // namespace tandem::rpc

#endif  // TANDEM_COMMON_RPC_SERVER_SERVER_MAIN_H_
