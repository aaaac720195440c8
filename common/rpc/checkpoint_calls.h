// SaveCheckpoint, LoadCheckpoint and ExportModel over an engine, which trainer and critic share.
#ifndef TANDEM_COMMON_RPC_CHECKPOINT_CALLS_H_
#define TANDEM_COMMON_RPC_CHECKPOINT_CALLS_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/logging.h"
#include "common/base/status_macros.h"
#include "common/rpc/call_executor.h"
#include "common/rpc/engine_turn.h"
#include "common/rpc/metrics.h"
#include "common/rpc/phase_timer.h"
#include "common/rpc/proto_convert.h"

namespace tandem::rpc {

inline absl::Status CheckPath(absl::string_view field, const std::string& path) {
  if (path.empty()) return InvalidField(field, "is required");
  if (path.find('\0') != std::string::npos) return InvalidField(field, "holds a NUL byte");
  return absl::OkStatus();
}

// `name` is one component of a path.
inline absl::Status CheckSaveFields(const std::string& directory, const std::string& name,
                                    int64_t keep) {
  if (absl::Status status = CheckPath("directory", directory); !status.ok()) return status;
  if (absl::Status status = CheckPath("name", name); !status.ok()) return status;
  if (name == "." || name == ".." || name.find('/') != std::string::npos) {
    return InvalidField("name", "must be one directory name");
  }
  if (keep < 0) return InvalidField("keep", absl::StrCat("must not be negative, got ", keep));
  return absl::OkStatus();
}

// FLOAT32 when not set.
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

// Each takes the engine's turn, checks its request first, and times itself into
// tandem_step_seconds. `Engine` has methods of the same names.

template <typename Response, typename Engine, typename Request>
absl::StatusOr<Response> SaveCheckpoint(Engine& engine, EngineTurn& turn, Metrics& metrics,
                                        const Request& request, const CallContext& context) {
  TANDEM_RETURN_IF_ERROR(CheckSaveFields(request.directory(), request.name(), request.keep()));
  TANDEM_ASSIGN_OR_RETURN(const auto saved, turn.Run(context, [&] {
    const PhaseTimer timer(metrics, "save");
    return engine.SaveCheckpoint(request.directory(), request.name(), request.keep());
  }));
  metrics.Gauge(metric::kCheckpointTime).SetToCurrentTime();
  metrics.Gauge(metric::kCheckpointBytes).Set(static_cast<double>(saved.bytes));
  Log(LogLevel::kInfo, "checkpoint_saved", {{"path", saved.path}, {"bytes", saved.bytes}});
  Response response;
  response.set_path(saved.path);
  response.set_bytes(saved.bytes);
  return response;
}

// The caller reports the version that it loaded.
template <typename Engine, typename Request>
absl::Status LoadCheckpoint(Engine& engine, EngineTurn& turn, Metrics& metrics,
                            const Request& request, const CallContext& context) {
  TANDEM_RETURN_IF_ERROR(CheckPath("path", request.path()));
  TANDEM_RETURN_IF_ERROR(turn.Run(context, [&] {
    const PhaseTimer timer(metrics, "load");
    return engine.LoadCheckpoint(request.path());
  }));
  Log(LogLevel::kInfo, "checkpoint_loaded", {LogField{"path", request.path()}});
  return absl::OkStatus();
}

template <typename Response, typename Engine, typename Request>
absl::StatusOr<Response> ExportModel(Engine& engine, EngineTurn& turn, Metrics& metrics,
                                     const Request& request, const CallContext& context) {
  TANDEM_RETURN_IF_ERROR(CheckPath("path", request.path()));
  TANDEM_ASSIGN_OR_RETURN(const DType dtype, ExportDType(request.dtype()));
  TANDEM_RETURN_IF_ERROR(turn.Run(context, [&] {
    const PhaseTimer timer(metrics, "export");
    return engine.ExportModel(request.path(), dtype);
  }));
  Response response;
  response.set_path(request.path());
  return response;
}

}  // namespace tandem::rpc

#endif  // TANDEM_COMMON_RPC_CHECKPOINT_CALLS_H_
