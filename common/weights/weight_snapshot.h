// Copies of a model's weights, as the byte stream of a transfer (weight_transfer.h).
#ifndef TANDEM_COMMON_WEIGHTS_WEIGHT_SNAPSHOT_H_
#define TANDEM_COMMON_WEIGHTS_WEIGHT_SNAPSHOT_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/tensor/aten/named_tensors.h"
#include "common/tensor/weight_spec.h"
#include "common/weights/weight_transfer.h"
#include "common/weights/weights_version.h"

namespace tandem {

// Returns `tensors` in the types in which `receivers` want them, for MakeWeightSnapshot: one that
// is wanted in several types comes once in each of them. Without receivers all are float32.
std::vector<WeightSpec> InWantedTypes(const std::vector<WeightSpec>& tensors,
                                      const std::vector<TensorTypes>& receivers);

// Describes a copy of `tensors`, those of `components` behind the model's, with names of an update.
// `weights` has the digest of the model's tensors, and `num_token_ids` is that of the model; a
// receiver compares both. `adapter`: WeightManifest::adapter, where the tensors are those of a
// model's adapters.
WeightManifest ManifestOf(std::vector<WeightSpec> tensors, const WeightsVersion& weights,
                          int64_t num_token_ids, std::vector<ComponentManifest> components = {},
                          std::string adapter = {});

// Makes an immutable copy of the tensors that `source` gives, on any device and of any floating
// type. The manifest names them in this order, each with the type, float32 or bfloat16, that it is
// converted to; one that is listed in several types, one behind the other, is given once and kept
// in all of them.
//
// The copy is in a file without a name in the directory for temporary files (TMPDIR), so that the
// process holds one tensor at a time; the file of the last released copy is used again. Errors of
// VisitTensors and CheckCopiedModel (copied_tensors.h); RESOURCE_EXHAUSTED names directory and
// bytes when there is no space for them; else errors of the file.
absl::StatusOr<std::shared_ptr<const WeightSource>> MakeWeightSnapshot(WeightManifest manifest,
                                                                       TensorSource source);

}  // namespace tandem

#endif  // TANDEM_COMMON_WEIGHTS_WEIGHT_SNAPSHOT_H_
