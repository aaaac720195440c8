// Copies of a model's weights as the byte stream that publishing sends.
#ifndef TANDEM_COMMON_TRAINING_WEIGHT_SNAPSHOT_H_
#define TANDEM_COMMON_TRAINING_WEIGHT_SNAPSHOT_H_

#include <memory>

#include "absl/status/statusor.h"
#include "common/base/weights_version.h"
#include "common/tensor/named_tensors.h"
#include "common/tensor/weight_transfer.h"

namespace tandem::training {

// An immutable copy on the host, in float32, of tensors on any device; the memory of the last one
// that was let go is used again. `weights` has the tensors' digest, which whoever receives the copy
// checks. INVALID_ARGUMENT names a tensor that is not floating-point.
absl::StatusOr<std::shared_ptr<const WeightSource>> MakeWeightSnapshot(
    const NamedTensors& tensors, const WeightsVersion& weights);

}  // namespace tandem::training

#endif  // TANDEM_COMMON_TRAINING_WEIGHT_SNAPSHOT_H_
