#include "common/tensor/aten/tensor_check.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/tensor/aten/aten_bytes.h"

namespace tandem {

absl::Status TensorError(const TensorView& view, absl::string_view problem) {
  return absl::InvalidArgumentError(
      absl::StrCat(view.file, ": tensor '", view.name, "': ", problem));
}

absl::Status CheckFloatTensor(const TensorView& view, absl::Span<const int64_t> shape) {
  if (view.shape != shape) {
    return TensorError(view, absl::StrCat("shape [", absl::StrJoin(view.shape, ", "),
                                          "], expected [", absl::StrJoin(shape, ", "), "]"));
  }
  if (!c10::isFloatingType(ToScalarType(view.dtype))) {
    return TensorError(view,
                       absl::StrCat("type ", DTypeName(view.dtype), " is not floating-point"));
  }
  return absl::OkStatus();
}

}  // namespace tandem
