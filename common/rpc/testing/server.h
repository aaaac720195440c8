// For tests: an app behind a real server on free loopback ports, without a process.
#ifndef TANDEM_COMMON_RPC_TESTING_SERVER_H_
#define TANDEM_COMMON_RPC_TESTING_SERVER_H_

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "common/base/steady_time.h"
#include "common/rpc/calls/call_executor.h"
#include "common/rpc/client/channel.h"
#include "common/rpc/server/server.h"
#include "common/rpc/server/server_main.h"

namespace tandem::rpc {

// A channel to a server that is not going to be silent.
inline std::shared_ptr<grpc::Channel> TestChannel(const std::string& address) {
  return MakeChannel(address,
                     {.keepalive = absl::Minutes(1), .keepalive_timeout = absl::Minutes(1)});
}

// Starts, loads and opens the gate as RunServer does, and ends in the same order.
class TestServer {
 public:
  using CreateApp = std::function<std::unique_ptr<ServerApp>(ServerRuntime&)>;

  explicit TestServer(
      const CreateApp& create,
      const CallExecutorOptions& options = {.default_deadline = absl::Seconds(60),
                                            .streams = {.patience = absl::Seconds(60)}},
      const config::v1::ServerOptions& server_options = {})
      : options_(Resolved(server_options)),
        security_(Secured(options_, metrics_)),
        executor_(std::make_unique<CallExecutor>(WithAccess(options, security_->access()))) {
    app_ = create(runtime_);
    auto server = Server::Start(options_, app_->services(), *executor_, *security_, &metrics_);
    EXPECT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
    runtime_.advertised_address = address();
    absl::Status loaded = app_->Load();
    EXPECT_TRUE(loaded.ok()) << loaded;
    executor_->SetGate(CallExecutor::Gate::kOpen);
    server_->SetServing(true);
  }
  ~TestServer() { Stop(); }

  std::string address() const { return absl::StrCat("127.0.0.1:", server_->grpc_port()); }
  std::shared_ptr<grpc::Channel> channel() const { return TestChannel(address()); }
  CallExecutor& executor() { return *executor_; }
  Metrics& metrics() { return metrics_; }
  ServerApp& app() { return *app_; }
  Server& server() { return *server_; }
  ServerSecurity& security() { return *security_; }

  void Drain() {
    executor_->SetGate(CallExecutor::Gate::kDraining);
    app_->Drain(SteadyTime::Now() + absl::Seconds(10));
  }
  // Stops the server: its peers see a dead one.
  void Stop() {
    if (server_ == nullptr) return;
    Drain();
    server_->Shutdown(SteadyTime::InfinitePast());
    app_->Stop();
    server_.reset();
    executor_.reset();
    app_.reset();
  }

 private:
  static config::v1::ServerOptions Resolved(const config::v1::ServerOptions& options) {
    config::v1::TrainerServerConfig config;
    config.set_model("unused");
    *config.mutable_server() = options;
    config.mutable_server()->set_grpc_port(0);
    config.mutable_server()->set_metrics_port(0);
    const absl::Status resolved = config::Resolve(&config);
    EXPECT_TRUE(resolved.ok()) << resolved;
    return config.server();
  }
  static std::unique_ptr<ServerSecurity> Secured(const config::v1::ServerOptions& options,
                                                 Metrics& metrics) {
    auto security = ServerSecurity::Load(options, metrics);
    EXPECT_TRUE(security.ok()) << security.status();
    return *std::move(security);
  }
  static CallExecutorOptions WithAccess(CallExecutorOptions options, const AccessControl& access) {
    options.access = &access;
    return options;
  }

  Metrics metrics_;
  const config::v1::ServerOptions options_;
  const std::unique_ptr<ServerSecurity> security_;
  std::unique_ptr<CallExecutor> executor_;
  ServerRuntime runtime_{
      .executor = *executor_, .metrics = metrics_, .start_time = SteadyTime::Now()};
  std::unique_ptr<ServerApp> app_;
  std::unique_ptr<Server> server_;
};

// Waits up to 20 s for `condition`.
inline bool Eventually(const std::function<bool()>& condition) {
  for (int i = 0; i < 2000; ++i) {
    if (condition()) return true;
    absl::SleepFor(absl::Milliseconds(10));
  }
  return condition();
}

}  // namespace tandem::rpc

#endif  // TANDEM_COMMON_RPC_TESTING_SERVER_H_
