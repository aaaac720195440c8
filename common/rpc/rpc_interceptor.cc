#include "common/rpc/rpc_interceptor.h"

#include <chrono>
#include <mutex>
#include <random>
#include <string>
#include <unordered_map>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_format.h"
#include "common/base/logging.h"
#include "common/rpc/request_id.h"

namespace tandem::rpc {
namespace {

using grpc::experimental::InterceptionHookPoints;

constexpr size_t kMaxRequestIdBytes = 128;

// The ids of the calls in progress.
class RequestIds {
 public:
  static RequestIds& Get() {
    static auto* const ids = new RequestIds;
    return *ids;
  }
  void Put(const grpc::ServerContextBase* context, std::string id) {
    std::lock_guard lock(mutex_);
    ids_[context] = std::move(id);
  }
  void Remove(const grpc::ServerContextBase* context) {
    std::lock_guard lock(mutex_);
    ids_.erase(context);
  }
  std::string Find(const grpc::ServerContextBase* context) {
    std::lock_guard lock(mutex_);
    const auto found = ids_.find(context);
    return found == ids_.end() ? std::string() : found->second;
  }

 private:
  std::mutex mutex_;
  std::unordered_map<const grpc::ServerContextBase*, std::string> ids_;
};

std::string NewRequestId() {
  thread_local std::mt19937_64 generator{std::random_device{}()};
  return absl::StrFormat("%016x%016x", generator(), generator());
}

// The client's id if it is short, printable text, else a new one.
std::string ChooseRequestId(const grpc::ServerContextBase& context) {
  const auto& metadata = context.client_metadata();
  const auto found = metadata.find(kRequestIdKey);
  if (found == metadata.end()) return NewRequestId();
  std::string id(found->second.data(), found->second.size());
  if (id.empty() || id.size() > kMaxRequestIdBytes) return NewRequestId();
  for (const char c : id) {
    if (c < 0x21 || c > 0x7e) return NewRequestId();
  }
  return id;
}

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

class RpcInterceptor final : public grpc::experimental::Interceptor {
 public:
  RpcInterceptor(grpc::experimental::ServerRpcInfo* info, Metrics* metrics,
                 std::atomic<int64_t>* live_calls)
      : context_(info->server_context()),
        metrics_(metrics),
        live_calls_(live_calls),
        start_(std::chrono::steady_clock::now()) {
    const std::string path = info->method();  // "/package.Service/Method"
    const size_t slash = path.rfind('/');
    service_ = slash == 0 || slash == std::string::npos ? "unknown" : path.substr(1, slash - 1);
    method_ = slash == std::string::npos ? path : path.substr(slash + 1);
    counts_ = !IsInfrastructure(service_);
    request_id_ = ChooseRequestId(*context_);
    RequestIds::Get().Put(context_, request_id_);
    metrics_->Gauge(metric::kRpcLive, {service_, method_}).Increment();
    if (counts_) live_calls_->fetch_add(1);
  }

  ~RpcInterceptor() override {
    if (!handled_) Record(grpc::StatusCode::CANCELLED, "");
    metrics_->Gauge(metric::kRpcLive, {service_, method_}).Decrement();
    RequestIds::Get().Remove(context_);
    if (counts_) live_calls_->fetch_sub(1);
  }

  void Intercept(grpc::experimental::InterceptorBatchMethods* methods) override {
    if (methods->QueryInterceptionHookPoint(InterceptionHookPoints::PRE_SEND_STATUS)) {
      const grpc::Status status = methods->GetSendStatus();
      Record(status.error_code(), status.error_message());
      if (auto* trailing = methods->GetSendTrailingMetadata(); trailing != nullptr) {
        trailing->emplace(kRequestIdKey, request_id_);
      }
    }
    methods->Proceed();
  }

 private:
  void Record(grpc::StatusCode code, const std::string& message) {
    if (std::exchange(handled_, true)) return;
    const double seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
    const std::string code_name = absl::StatusCodeToString(static_cast<absl::StatusCode>(code));
    metrics_->Counter(metric::kRpcHandled, {service_, method_, code_name}).Increment();
    metrics_->Histogram(metric::kRpcSeconds, {service_, method_}).Observe(seconds);
    Log(LevelOf(code), "rpc_handled",
        {{"grpc_service", service_},
         {"grpc_method", method_},
         {"grpc_code", code_name},
         {"seconds", seconds},
         {"message", message},
         {"request_id", request_id_}});
  }

  grpc::ServerContextBase* const context_;
  Metrics* const metrics_;
  std::atomic<int64_t>* const live_calls_;
  const std::chrono::steady_clock::time_point start_;
  std::string service_;
  std::string method_;
  std::string request_id_;
  bool counts_ = true;
  bool handled_ = false;
};

class RpcInterceptorFactory final : public grpc::experimental::ServerInterceptorFactoryInterface {
 public:
  RpcInterceptorFactory(Metrics* metrics, std::atomic<int64_t>* live_calls)
      : metrics_(metrics), live_calls_(live_calls) {}
  grpc::experimental::Interceptor* CreateServerInterceptor(
      grpc::experimental::ServerRpcInfo* info) override {
    return new RpcInterceptor(info, metrics_, live_calls_);
  }

 private:
  Metrics* const metrics_;
  std::atomic<int64_t>* const live_calls_;
};

}  // namespace

std::string RequestId(const grpc::ServerContextBase* context) {
  return RequestIds::Get().Find(context);
}

std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface> MakeRpcInterceptor(
    Metrics* metrics, std::atomic<int64_t>* live_calls) {
  return std::make_unique<RpcInterceptorFactory>(metrics, live_calls);
}

}  // namespace tandem::rpc
