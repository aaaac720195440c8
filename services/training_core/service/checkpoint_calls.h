// The calls SaveCheckpoint, LoadCheckpoint and ExportModel, which trainer and critic share.
#ifndef TANDEM_SERVICES_TRAINING_CORE_SERVICE_CHECKPOINT_CALLS_H_
#define TANDEM_SERVICES_TRAINING_CORE_SERVICE_CHECKPOINT_CALLS_H_

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/base/call_scope.h"
#include "common/base/errors/error.h"
#include "common/base/errors/field_check.h"
#include "common/base/errors/status_macros.h"
#include "common/base/files/paths/confined_folder.h"
#include "common/base/files/paths/path_roots.h"
#include "common/base/logging.h"
#include "common/checkpoint/checkpoint.h"
#include "common/rpc/convert/proto_convert.h"
#include "common/rpc/metrics/metrics.h"
#include "common/rpc/metrics/phase_timer.h"
#include "services/training_core/engine.h"
#include "tandem/types/v1/optimizer.pb.h"

namespace tandem::training {

// Returns FLOAT32 for a dtype that is not set.
inline absl::StatusOr<DType> ExportDType(types::v1::DataType proto) {
  switch (proto) {
    case types::v1::DATA_TYPE_UNSPECIFIED:
    case types::v1::DATA_TYPE_FLOAT32:
      return DType::kFloat32;
    case types::v1::DATA_TYPE_BFLOAT16:
      return DType::kBFloat16;
    case types::v1::DATA_TYPE_FLOAT16:
      return DType::kFloat16;
    default:
      return InvalidField("dtype", "must be FLOAT32, BFLOAT16 or FLOAT16");
  }
}

// Returns KEEP for a state that is not set.
inline absl::StatusOr<OptimizerState> ToOptimizerState(types::v1::OptimizerState proto) {
  switch (proto) {
    case types::v1::OPTIMIZER_STATE_UNSPECIFIED:
    case types::v1::OPTIMIZER_STATE_KEEP:
      return OptimizerState::kKeep;
    case types::v1::OPTIMIZER_STATE_FRESH:
      return OptimizerState::kFresh;
    default:
      return InvalidField("optimizer", "must be KEEP or FRESH");
  }
}

// The calls below check the request first, its path against `roots`. Loads and exports record their
// time in tandem_step_seconds; of saves TrainingService::OnCheckpoint does.

template <typename Response, typename Request>
absl::StatusOr<Response> SaveCheckpoint(Engine& engine, const PathRoots& roots,
                                        const Request& request, const CallScope& call) {
  TANDEM_ASSIGN_OR_RETURN(const ConfinedPath directory,
                          roots.Confine("directory", request.directory()));
  TANDEM_RETURN_IF_ERROR(checkpoint::CheckName(request.name()));
  TANDEM_RETURN_IF_ERROR(CheckAtLeast("keep", request.keep(), 0));
  SaveRequest save = {.directory = directory.path,
                      .name = request.name(),
                      .keep = request.keep(),
                      .expected_version = std::nullopt,
                      .root = directory.root,
                      .in_background = request.in_background()};
  if (request.has_expected_version()) save.expected_version = request.expected_version();
  if (save.in_background && !save.expected_version.has_value()) {
    return InvalidField("in_background", "needs expected_version");
  }
  TANDEM_ASSIGN_OR_RETURN(const checkpoint::Saved saved, engine.SaveCheckpoint(call, save));
  Response response;
  response.set_pending(saved.pending);
  response.set_path(saved.path);
  response.set_bytes(saved.bytes);
  return response;
}

template <typename Response, typename Request>
absl::StatusOr<Response> LoadCheckpoint(Engine& engine, const PathRoots& roots,
                                        rpc::Metrics& metrics, const Request& request,
                                        const CallScope& call) {
  if (request.source_case() == Request::SOURCE_NOT_SET) {
    return InvalidField("source", "is required: path or base_model");
  }
  const bool base = request.source_case() == Request::kBaseModel;
  if (base && !request.base_model()) return InvalidField("base_model", "must be true");
  LoadRequest load;
  TANDEM_ASSIGN_OR_RETURN(load.optimizer, ToOptimizerState(request.optimizer()));
  if (!base) {
    TANDEM_ASSIGN_OR_RETURN(const ConfinedPath path, roots.Confine("path", request.path()));
    load.path = path.path;
    load.root = path.root;
  }
  const rpc::PhaseTimer timer(metrics, "load");
  TANDEM_RETURN_IF_ERROR(base ? engine.LoadBaseModel(call) : engine.LoadCheckpoint(call, load));
  const EngineInfo info = engine.Info();
  Log(LogLevel::kInfo, base ? "base_model_loaded" : "checkpoint_loaded",
      {LogField{"path", base ? info.model.path : load.path},
       {"optimizer_updates", info.optimizer_steps}});
  Response response;
  rpc::WeightsVersionToProto(info.weights, response.mutable_weights());
  response.set_optimizer_steps(info.optimizer_steps);
  return response;
}

template <typename Response, typename Request>
absl::StatusOr<Response> ExportModel(Engine& engine, const PathRoots& roots, rpc::Metrics& metrics,
                                     const Request& request, const CallScope& call) {
  TANDEM_ASSIGN_OR_RETURN(const ConfinedPath path, roots.Confine("path", request.path()));
  TANDEM_ASSIGN_OR_RETURN(const DType dtype, ExportDType(request.dtype()));
  const rpc::PhaseTimer timer(metrics, "export");
  TANDEM_RETURN_IF_ERROR(engine.ExportModel(call, path, dtype));
  Response response;
  response.set_path(path.path);
  return response;
}

}  // namespace tandem::training

#endif  // TANDEM_SERVICES_TRAINING_CORE_SERVICE_CHECKPOINT_CALLS_H_
