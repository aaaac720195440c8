// Copies of a model's weights as the byte stream that publishing sends.
#ifndef TANDEM_COMMON_TRAINING_WEIGHT_SNAPSHOT_H_
#define TANDEM_COMMON_TRAINING_WEIGHT_SNAPSHOT_H_

#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "common/base/weights_version.h"
#include "common/tensor/named_tensors.h"
#include "common/tensor/weight_spec.h"
#include "common/tensor/weight_transfer.h"

namespace tandem::training {

// An immutable copy, in float32, of what `source` gives, which are `tensors` in this order, on any
// device and of any floating type. `weights` has their digest, which whoever receives the copy
// checks.
//
// The copy is in a file without a name in the directory for temporary files (TMPDIR), so that the
// process holds one tensor at a time; the file of the last one that was let go is used again.
// INVALID_ARGUMENT names a tensor that is not the one that is expected, or is not floating-point;
// RESOURCE_EXHAUSTED names directory and bytes when there is no space for them; else errors of
// `source` or of the file.
absl::StatusOr<std::shared_ptr<const WeightSource>> MakeWeightSnapshot(
    const std::vector<WeightSpec>& tensors, TensorSource source, const WeightsVersion& weights);

}  // namespace tandem::training

#endif  // TANDEM_COMMON_TRAINING_WEIGHT_SNAPSHOT_H_
