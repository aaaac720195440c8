// A per-token tensor field of a request.
#ifndef TANDEM_COMMON_RPC_CONVERT_FLOAT_FIELD_H_
#define TANDEM_COMMON_RPC_CONVERT_FLOAT_FIELD_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "common/base/errors/error.h"
#include "common/base/errors/field_check.h"
#include "common/rpc/convert/proto_convert.h"

namespace tandem::rpc {

// Returns the values of `tensor`, which must be FLOAT32 [length] and finite. Errors name `path`.
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

#endif  // TANDEM_COMMON_RPC_CONVERT_FLOAT_FIELD_H_
