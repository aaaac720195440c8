// The half of their gRPC services that trainer and critic share: server info, checkpoints, and the
// log and metrics of a step. No tensors.
#ifndef TANDEM_SERVICES_TRAINING_CORE_SERVICE_TRAINING_SERVICE_H_
#define TANDEM_SERVICES_TRAINING_CORE_SERVICE_TRAINING_SERVICE_H_

#include <cstdint>
#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "common/rpc/calls/byte_budget.h"
#include "common/rpc/calls/call_executor.h"
#include "common/rpc/calls/unary_handler.h"
#include "common/rpc/metrics/metrics.h"
#include "common/rpc/server/server_main.h"
#include "common/rpc/transfer/blob_service.h"
#include "common/rpc/transfer/blob_store.h"
#include "services/training_core/engine.h"
#include "services/training_core/service/checkpoint_calls.h"
#include "tandem/config/v1/optimizer_info.pb.h"
#include "tandem/config/v1/server_config.pb.h"
#include "tandem/types/v1/server.pb.h"

namespace tandem::training {

struct ServiceOptions {
  std::string role;         // "trainer" or "critic"
  int64_t max_samples = 0;  // of a step
  // Tokens of sequences that are evaluated together, before others get their turn.
  int64_t evaluation_tokens = 0;
  int64_t blob_cache_bytes = 0;            // most bytes of pixels, where the model takes images
  config::v1::OptimizerOptions optimizer;  // resolved
  // Limit for the samples of steps that are being received or trained, of all calls together.
  int64_t max_buffered_bytes = int64_t{1} << 30;
};

class TrainingService {
 public:
  // `runtime` must outlive the service.
  TrainingService(const ServiceOptions& options, const rpc::ServerRuntime& runtime);

  // Before the executor's gate opens; `engine` must outlive the calls.
  void SetEngine(Engine* engine);

  rpc::CallExecutor& executor() { return executor_; }
  rpc::Metrics& metrics() { return metrics_; }
  rpc::ByteBudget& budget() { return budget_; }
  const ServiceOptions& options() const { return options_; }
  // The pixels of images, which requests name, and the service that receives them.
  rpc::BlobStore& blobs() { return blobs_; }
  rpc::NamedService blob_service() {
    return {blobs::v1::BlobService::service_full_name(), &blob_service_};
  }

  types::v1::ServerInfo ServerInfo() const;
  // Refreshes gauges from the engine's info.
  void UpdateMetrics();

  // Logs a checkpoint, and updates metrics. Thread-safe.
  void OnCheckpoint(const CheckpointReport& report);

  // Runs a step, logs it, and updates counters and the gauges of its report. `num_tokens` returns
  // the number of response tokens that were trained.
  absl::StatusOr<StepResult> RunStep(const StepIdentity& identity,
                                     absl::FunctionRef<int64_t(const StepReport&)> num_tokens,
                                     absl::FunctionRef<absl::StatusOr<StepResult>()> run);

  template <typename Request, typename Response>
  grpc::ServerUnaryReactor* HandleSave(grpc::CallbackServerContext* context,
                                       const grpc::ByteBuffer* request,
                                       grpc::ByteBuffer* response) {
    return rpc::HandleUnary<Request, Response>(
        executor_, context, request, response, [this](const auto& request, const auto& call) {
          return SaveCheckpoint<Response>(*engine_, runtime_.path_roots, request, call);
        });
  }
  template <typename Request, typename Response>
  grpc::ServerUnaryReactor* HandleLoad(grpc::CallbackServerContext* context,
                                       const grpc::ByteBuffer* request,
                                       grpc::ByteBuffer* response) {
    return rpc::HandleUnary<Request, Response>(
        executor_, context, request, response, [this](const auto& request, const auto& call) {
          auto loaded =
              LoadCheckpoint<Response>(*engine_, runtime_.path_roots, metrics_, request, call);
          if (loaded.ok()) UpdateMetrics();
          return loaded;
        });
  }
  template <typename Request, typename Response>
  grpc::ServerUnaryReactor* HandleExport(grpc::CallbackServerContext* context,
                                         const grpc::ByteBuffer* request,
                                         grpc::ByteBuffer* response) {
    return rpc::HandleUnary<Request, Response>(
        executor_, context, request, response, [this](const auto& request, const auto& call) {
          return ExportModel<Response>(*engine_, runtime_.path_roots, metrics_, request, call);
        });
  }

 private:
  const ServiceOptions options_;
  const rpc::ServerRuntime& runtime_;
  rpc::CallExecutor& executor_;
  rpc::Metrics& metrics_;
  rpc::ByteBudget budget_;
  rpc::BlobStore blobs_;
  rpc::BlobService blob_service_;
  Engine* engine_ = nullptr;
};

// Describes an optimizer of resolved `options` that has made `updates` updates.
config::v1::OptimizerInfo DescribeOptimizer(const config::v1::OptimizerOptions& options,
                                            int64_t updates);

// Shuts the engine down. Saves `directory`/shutdown first, unless `directory` is empty or the
// engine has no unsaved state.
void ShutDownEngine(Engine& engine, const std::string& directory);

}  // namespace tandem::training

#endif  // TANDEM_SERVICES_TRAINING_CORE_SERVICE_TRAINING_SERVICE_H_
