// Copies of a model's weights as the byte stream that publishing sends.
#ifndef TANDEM_COMMON_TRAINING_WEIGHT_SNAPSHOT_H_
#define TANDEM_COMMON_TRAINING_WEIGHT_SNAPSHOT_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "common/tensor/named_tensors.h"
#include "common/tensor/weight_transfer.h"

namespace tandem::training {

// XXH3-128 of the concatenated bytes of `tensors` (contiguous, on the CPU): the digest of a
// WeightManifest.
std::string WeightStreamDigest(const NamedTensors& tensors);

// An immutable copy. INVALID_ARGUMENT for tensors that are not contiguous CPU tensors of a type
// that a checkpoint can hold.
absl::StatusOr<std::shared_ptr<const WeightSource>> MakeWeightSnapshot(const NamedTensors& tensors,
                                                                       int64_t version);

}  // namespace tandem::training

#endif  // TANDEM_COMMON_TRAINING_WEIGHT_SNAPSHOT_H_
