// Checks of the checkpoint and export requests, which trainer and critic share.
#ifndef TANDEM_COMMON_RPC_CHECKPOINT_FIELDS_H_
#define TANDEM_COMMON_RPC_CHECKPOINT_FIELDS_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "common/base/error.h"
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

}  // namespace tandem::rpc

#endif  // TANDEM_COMMON_RPC_CHECKPOINT_FIELDS_H_
