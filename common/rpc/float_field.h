// A per-token tensor field of a request.
#ifndef TANDEM_COMMON_RPC_FLOAT_FIELD_H_
#define TANDEM_COMMON_RPC_FLOAT_FIELD_H_

#include <cmath>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "common/base/error.h"
#include "common/rpc/proto_convert.h"

namespace tandem::rpc {

// INVALID_ARGUMENT names the first entry that is NaN or infinite: "advantages[7]".
inline absl::Status CheckFinite(absl::string_view path, std::span<const float> values) {
  for (size_t i = 0; i < values.size(); ++i) {
    if (!std::isfinite(values[i])) {
      return InvalidField(absl::StrCat(path, "[", i, "]"), "is not finite");
    }
  }
  return absl::OkStatus();
}

// FLOAT32 [length], all finite. Errors name `path`.
inline absl::StatusOr<std::vector<float>> FloatField(absl::string_view path,
                                                     const types::v1::Tensor& tensor,
                                                     int64_t length) {
  absl::StatusOr<std::vector<float>> values = FloatsFromProto(tensor);
  if (!values.ok()) return PrependFieldPath(path, values.status());
  if (static_cast<int64_t>(values->size()) != length) {
    return InvalidField(path, absl::StrCat("has ", values->size(), " entries, expected ", length));
  }
  if (absl::Status finite = CheckFinite(path, *values); !finite.ok()) return finite;
  return values;
}

}  // namespace tandem::rpc

#endif  // TANDEM_COMMON_RPC_FLOAT_FIELD_H_
