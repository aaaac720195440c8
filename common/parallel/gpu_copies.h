// Copies of a model's weights in the memory of the GPUs of a trainer's ranks, for receivers with
// GPUs of the same machine (docs/adr/0129). Each rank keeps a part: whole tensors.
#ifndef TANDEM_COMMON_PARALLEL_GPU_COPIES_H_
#define TANDEM_COMMON_PARALLEL_GPU_COPIES_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/parallel/strategy.h"
#include "common/tensor/aten/named_tensors.h"
#include "common/tensor/aten/peer_memory.h"
#include "common/tensor/weight_spec.h"
#include "common/weights/gpu/gpu_copy.h"
#include "common/weights/weight_transfer.h"

namespace tandem::parallel {

// Every rank makes the same calls. Not thread-safe.
class GpuCopies {
 public:
  // `strategy` outlives the copies. `most_bytes`: that copies may take on this rank's GPU.
  GpuCopies(Strategy& strategy, int64_t most_bytes)
      : strategy_(strategy), most_bytes_(most_bytes) {}

  // Makes the memory of a copy of `tensors`, on every rank or, with the error, on none.
  // RESOURCE_EXHAUSTED if a rank has no place, or, of several ranks, while the source of the last
  // copy lives: its parts on the other ranks live as long. Errors of ShareMemory, and of PeerMemory
  // where rank 0 cannot read the memory of the others. Collective.
  absl::Status Reserve(const std::vector<WeightSpec>& tensors);

  // Copies the parameters that the manifest, of the tensors of Reserve, names, and `heads`, which
  // every rank has, to that memory. Returns the copy on rank 0, and nullptr on the others, which
  // keep their parts until the next Reserve. Errors of GpuCopy and MakeGpuSnapshot, on all ranks.
  // Collective.
  absl::StatusOr<std::shared_ptr<const WeightSource>> Fill(WeightManifest manifest,
                                                           const NamedTensors& heads);

 private:
  Strategy& strategy_;
  const int64_t most_bytes_;
  // This rank's part; on rank 0 until a source has it. nullptr if it has no tensor.
  std::unique_ptr<GpuCopy> part_;
  std::shared_ptr<const PeerMemory> others_;  // on rank 0, those of the other ranks
  std::weak_ptr<const WeightSource> last_;    // on rank 0
};

}  // namespace tandem::parallel

#endif  // TANDEM_COMMON_PARALLEL_GPU_COPIES_H_
