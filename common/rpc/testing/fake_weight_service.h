// For tests: a WeightService whose GetVersion is whatever the test says.
#ifndef TANDEM_COMMON_RPC_TESTING_FAKE_WEIGHT_SERVICE_H_
#define TANDEM_COMMON_RPC_TESTING_FAKE_WEIGHT_SERVICE_H_

#include <atomic>
#include <functional>
#include <utility>

#include "common/rpc/calls/unary_handler.h"
#include "common/rpc/server/server_main.h"
#include "tandem/weights/v1/weights.grpc.pb.h"

namespace tandem::rpc {

class FakeWeightService final : public weights::v1::WeightService::WithRawCallbackMethod_GetVersion<
                                    weights::v1::WeightService::Service> {
 public:
  using Handler = UnaryHandler<weights::v1::GetVersionRequest, weights::v1::GetVersionResponse>;

  FakeWeightService(CallExecutor& executor, Handler handler)
      : executor_(executor), handler_(std::move(handler)) {}

  grpc::ServerUnaryReactor* GetVersion(grpc::CallbackServerContext* context,
                                       const grpc::ByteBuffer* request,
                                       grpc::ByteBuffer* response) override {
    return HandleUnary<weights::v1::GetVersionRequest, weights::v1::GetVersionResponse>(
        executor_, context, request, response, handler_);
  }

 private:
  CallExecutor& executor_;
  const Handler handler_;
};

class FakeApp final : public ServerApp {
 public:
  FakeApp(ServerRuntime& runtime, FakeWeightService::Handler handler)
      : service_(runtime.executor, std::move(handler)) {}
  std::vector<NamedService> services() override {
    return {{weights::v1::WeightService::service_full_name(), &service_}};
  }
  absl::Status Load() override { return load_ ? load_() : absl::OkStatus(); }
  absl::Status CheckHealth() override { return health_ ? health_() : absl::OkStatus(); }
  void Stop() override {
    if (stop_) stop_();
  }
  bool HasUnsavedState() const override { return unsaved_; }
  bool SavesStateOnStop() const override { return saves_; }

  std::function<absl::Status()> load_;
  std::function<absl::Status()> health_;
  std::function<void()> stop_;
  std::atomic<bool> unsaved_ = false;
  bool saves_ = true;

 private:
  FakeWeightService service_;
};

}  // namespace tandem::rpc

#endif  // TANDEM_COMMON_RPC_TESTING_FAKE_WEIGHT_SERVICE_H_
