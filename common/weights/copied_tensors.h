// Checks of copies of weights, wherever they are (weight_snapshot.h, gpu/gpu_copy.h).
#ifndef TANDEM_COMMON_WEIGHTS_COPIED_TENSORS_H_
#define TANDEM_COMMON_WEIGHTS_COPIED_TENSORS_H_

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "common/tensor/aten/named_tensors.h"
#include "common/tensor/weight_spec.h"
#include "common/weights/weight_transfer.h"

namespace tandem {

// Calls `add` with each tensor of `source` and the range of `tensors` that it is, in several types.
// INVALID_ARGUMENT names a tensor that is not the expected one, in this order, or is not
// floating-point; else errors of `source` and `add`.
absl::Status VisitTensors(
    const std::vector<WeightSpec>& tensors, TensorSource source,
    absl::FunctionRef<absl::Status(size_t first, size_t last, const at::Tensor& tensor)> add);

// DATA_LOSS if tensors of a whole model are rounded and their float32 values, of digest `copied`,
// are not those of the manifest, which a receiver of rounded ones cannot see.
absl::Status CheckCopiedModel(const WeightManifest& manifest, const std::string& copied);

}  // namespace tandem

#endif  // TANDEM_COMMON_WEIGHTS_COPIED_TENSORS_H_
