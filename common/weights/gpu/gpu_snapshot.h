// A copy of weights in the memory of one GPU, or of several of a machine, as the source of a
// transfer (weight_transfer.h).
#ifndef TANDEM_COMMON_WEIGHTS_GPU_GPU_SNAPSHOT_H_
#define TANDEM_COMMON_WEIGHTS_GPU_GPU_SNAPSHOT_H_

#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "common/tensor/aten/peer_memory.h"
#include "common/weights/gpu/gpu_copy.h"
#include "common/weights/weight_transfer.h"

namespace tandem {

// Makes a source of a copy that has been filled: `own` has the first bytes of the stream, and
// `others` those behind, in memory of other processes; either may be null. `sums`: of all tensors,
// part behind part; empty if all are float32. Errors of CheckCopiedModel.
absl::StatusOr<std::shared_ptr<const WeightSource>> MakeGpuSnapshot(
    WeightManifest manifest, std::unique_ptr<const GpuCopy> own,
    std::shared_ptr<const PeerMemory> others, const std::vector<CopySums>& sums);

}  // namespace tandem

#endif  // TANDEM_COMMON_WEIGHTS_GPU_GPU_SNAPSHOT_H_
