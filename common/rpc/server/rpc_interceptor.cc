#include "common/rpc/server/rpc_interceptor.h"

#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "common/base/logging.h"
#include "common/base/steady_time.h"
#include "common/rpc/calls/error_table.h"
#include "common/rpc/guard/connection_guard.h"
#include "common/rpc/rate_limit.h"
#include "common/rpc/request_id.h"

namespace tandem::rpc {
namespace {

using grpc::experimental::InterceptionHookPoints;

bool IsInfrastructure(const std::string& service) {
  return absl::StartsWith(service, "grpc.health.") || absl::StartsWith(service, "grpc.reflection.");
}

LogLevel LevelOf(grpc::StatusCode code) {
  switch (code) {
    case grpc::StatusCode::OK:
    case grpc::StatusCode::CANCELLED:
      return LogLevel::kDebug;
    case grpc::StatusCode::UNKNOWN:
    case grpc::StatusCode::INTERNAL:
    case grpc::StatusCode::DATA_LOSS:
      return LogLevel::kError;
    default:
      return LogLevel::kWarning;
  }
}

// The name of methods that the server does not have: the client chose theirs, and they must not
// become metrics of their own.
constexpr char kUnknown[] = "unknown";

// UNAUTHENTICATED has the highest number.
constexpr int kNumStatusCodes = static_cast<int>(grpc::StatusCode::UNAUTHENTICATED) + 1;

std::string CodeName(grpc::StatusCode code) {
  return absl::StatusCodeToString(static_cast<absl::StatusCode>(code));
}

struct MethodName {
  std::string service;
  std::string method;
};

// Returns the names in the path of a method, "/package.Service/Method".
MethodName SplitPath(const std::string& path) {
  const size_t slash = path.rfind('/');
  return {path.substr(1, slash - 1), path.substr(slash + 1)};
}

// Lines about calls at level warning and above: at once, and in a second after that.
constexpr double kCallLogBurst = 100;
constexpr double kCallLogLinesPerSecond = 10;

// Bounds the lines that clients whose calls fail can write to the log.
class CallLog {
 public:
  // How many calls went unlogged since the last line; nullopt when this one does, too.
  std::optional<int64_t> Take() {
    std::lock_guard lock(mutex_);
    const SteadyTime now = SteadyTime::Now();
    if (lines_.overdrawn(now) || !lines_.Take(1, now)) {
      ++unlogged_;
      return std::nullopt;
    }
    return std::exchange(unlogged_, 0);
  }

 private:
  std::mutex mutex_;
  RateLimit lines_{kCallLogBurst, kCallLogLinesPerSecond, SteadyTime::Now()};
  int64_t unlogged_ = 0;
};

class RpcInterceptor final : public grpc::experimental::Interceptor {
 public:
  RpcInterceptor(grpc::experimental::ServerRpcInfo* info, const MethodTable& methods,
                 Metrics* metrics, CallLog* log, std::atomic<int64_t>* live_calls)
      : context_(info->server_context()),
        metrics_(metrics),
        log_(log),
        live_calls_(live_calls),
        start_(SteadyTime::Now()),
        path_(info->method()) {
    if (const auto known = methods.find(path_); known != methods.end()) {
      name_ = SplitPath(path_);
      request_type_ = &known->second;
    }
    counts_ = !IsInfrastructure(name_.service);
    metrics_->Gauge(metric::kRpcLive, {name_.service, name_.method}).Increment();
    if (counts_) live_calls_->fetch_add(1);
  }

  ~RpcInterceptor() override {
    if (!handled_) Record(grpc::StatusCode::CANCELLED, "", "");
    metrics_->Gauge(metric::kRpcLive, {name_.service, name_.method}).Decrement();
    if (counts_) live_calls_->fetch_sub(1);
  }

  void Intercept(grpc::experimental::InterceptorBatchMethods* methods) override {
    if (methods->QueryInterceptionHookPoint(InterceptionHookPoints::POST_RECV_MESSAGE)) {
      unreadable_ = methods->GetRecvMessage() == nullptr;
    }
    if (methods->QueryInterceptionHookPoint(InterceptionHookPoints::PRE_SEND_STATUS)) {
      // Handlers that know no request id (health, status) leave it to this place.
      auto& trailing = *methods->GetSendTrailingMetadata();
      auto id = trailing.find(kRequestIdKey);
      if (id == trailing.end()) id = trailing.emplace(kRequestIdKey, ChooseRequestId(*context_));
      grpc::Status status = methods->GetSendStatus();
      if (status.error_code() == grpc::StatusCode::UNIMPLEMENTED &&
          status.error_message().empty()) {
        status = ToGrpcStatus(Refusal());
        methods->ModifySendStatus(status);
      }
      Record(status.error_code(), status.error_message(), id->second);
    }
    methods->Proceed();
  }

 private:
  // The status for a call that grpc++ answers with an empty UNIMPLEMENTED.
  absl::Status Refusal() const {
    if (request_type_ != nullptr && unreadable_) {
      return absl::InvalidArgumentError(absl::StrCat("the bytes are not a ", *request_type_));
    }
    return absl::UnimplementedError(absl::StrCat("no such method: ", path_.substr(0, 200)));
  }

  void Record(grpc::StatusCode code, const std::string& message, const std::string& request_id) {
    if (std::exchange(handled_, true)) return;
    // So gRPC's own health service calls the end of a Watch whose client has gone.
    if (code == grpc::StatusCode::UNKNOWN && IsInfrastructure(name_.service) &&
        name_.method == "Watch") {
      code = grpc::StatusCode::CANCELLED;
    }
    const double seconds = absl::ToDoubleSeconds(SteadyTime::Now() - start_);
    const std::string code_name = CodeName(code);
    metrics_->Counter(metric::kRpcHandled, {name_.service, name_.method, code_name}).Increment();
    metrics_->Histogram(metric::kRpcSeconds, {name_.service, name_.method}).Observe(seconds);
    const LogLevel level = LevelOf(code);
    const ScopedCallLog call_log(request_id, TraceparentOf(*context_));
    int64_t unlogged = 0;
    if (level != LogLevel::kDebug) {
      const std::optional<int64_t> taken = log_->Take();
      if (!taken.has_value()) return;
      unlogged = *taken;
    }
    Log(level, "rpc_handled",
        {{"grpc_service", name_.service},
         {"grpc_method", name_.method},
         {"grpc_code", code_name},
         {"seconds", seconds},
         {"message", message},
         {"peer", PeerName(context_->peer())},
         {"not_logged", unlogged}});
  }

  grpc::ServerContextBase* const context_;
  Metrics* const metrics_;
  CallLog* const log_;
  std::atomic<int64_t>* const live_calls_;
  const SteadyTime start_;
  const std::string path_;
  const std::string* request_type_ = nullptr;  // null for an unknown method
  bool unreadable_ = false;
  MethodName name_{kUnknown, kUnknown};
  bool counts_ = true;
  bool handled_ = false;
};

class RpcInterceptorFactory final : public grpc::experimental::ServerInterceptorFactoryInterface {
 public:
  RpcInterceptorFactory(MethodTable methods, Metrics* metrics, std::atomic<int64_t>* live_calls)
      : methods_(std::move(methods)), metrics_(metrics), live_calls_(live_calls) {
    // `rate` and `increase` do not see the calls with which a series begins: all begin at 0.
    for (const auto& [path, request_type] : methods_) {
      const MethodName name = SplitPath(path);
      for (int code = 0; code < kNumStatusCodes; ++code) {
        metrics_->Counter(metric::kRpcHandled, {name.service, name.method,
                                                CodeName(static_cast<grpc::StatusCode>(code))});
      }
    }
  }
  grpc::experimental::Interceptor* CreateServerInterceptor(
      grpc::experimental::ServerRpcInfo* info) override {
    return new RpcInterceptor(info, methods_, metrics_, &log_, live_calls_);
  }

 private:
  const MethodTable methods_;
  Metrics* const metrics_;
  CallLog log_;
  std::atomic<int64_t>* const live_calls_;
};

}  // namespace

std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface> MakeRpcInterceptor(
    MethodTable methods, Metrics* metrics, std::atomic<int64_t>* live_calls) {
  return std::make_unique<RpcInterceptorFactory>(std::move(methods), metrics, live_calls);
}

}  // namespace tandem::rpc
