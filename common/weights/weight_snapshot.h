// Copies of a model's weights, as the byte stream of a transfer (weight_transfer.h).
#ifndef TANDEM_COMMON_WEIGHTS_WEIGHT_SNAPSHOT_H_
#define TANDEM_COMMON_WEIGHTS_WEIGHT_SNAPSHOT_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "common/tensor/aten/named_tensors.h"
#include "common/tensor/weight_spec.h"
#include "common/weights/weight_transfer.h"
#include "common/weights/weights_version.h"

namespace tandem {

// Makes an immutable float32 copy of the tensors that `source` gives: `tensors`, in this order, on
// any device and of any floating type; those of `components` come behind the model's and have names
// of an update. `weights` has the digest of the model's tensors, and `num_token_ids` is that of the
// model; a receiver compares both.
//
// The copy is in a file without a name in the directory for temporary files (TMPDIR), so that the
// process holds one tensor at a time; the file of the last released copy is used again.
// INVALID_ARGUMENT names a tensor that is not the expected one, or is not floating-point;
// RESOURCE_EXHAUSTED names directory and bytes when there is no space for them; else errors of
// `source` or of the file.
absl::StatusOr<std::shared_ptr<const WeightSource>> MakeWeightSnapshot(
    const std::vector<WeightSpec>& tensors, TensorSource source, const WeightsVersion& weights,
    int64_t num_token_ids, std::vector<ComponentManifest> components = {});

}  // namespace tandem

#endif  // TANDEM_COMMON_WEIGHTS_WEIGHT_SNAPSHOT_H_
