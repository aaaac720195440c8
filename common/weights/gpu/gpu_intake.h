// Tensors that are copied from memory of another process's GPU to this process's, added up and
// checked there.
#ifndef TANDEM_COMMON_WEIGHTS_GPU_GPU_INTAKE_H_
#define TANDEM_COMMON_WEIGHTS_GPU_GPU_INTAKE_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/tensor/weight_spec.h"
#include "common/weights/staged_weight_receiver.h"

namespace tandem {

// Returns the index, int64 [], of the first value that is infinite or NaN; the largest int64 if all
// are finite. Computed on the device of the values.
at::Tensor FirstNotFiniteOnDevice(const at::Tensor& values);

// Not thread-safe.
class GpuIntake {
 public:
  // Works on `stream`, behind what the default stream of its device had to do.
  explicit GpuIntake(c10::Stream stream) : stream_(stream) {}
  // Waits for the copies.
  ~GpuIntake();
  GpuIntake(const GpuIntake&) = delete;
  GpuIntake& operator=(const GpuIntake&) = delete;

  // Copies a tensor from `ranges`, which are PeerMemory of the stream's device, and calls `use`
  // with it, where the stream is the current one. The host does not wait itself. Errors of `use`
  // and of PeerMemory; may throw c10::Error.
  absl::Status Take(const WeightSpec& spec, absl::Span<const SharedRange> ranges,
                    absl::FunctionRef<absl::Status(const at::Tensor& tensor)> use);
  // Waits for all that was taken, and returns each tensor once, in order. May throw c10::Error.
  std::vector<ReadTensor> TakeRead();

 private:
  const c10::Stream stream_;
  std::vector<std::pair<std::string, at::Tensor>> pending_;  // sums, first not finite: int64 [3]
  // A copy that is queued needs it.
  std::set<std::shared_ptr<const SharedBytes>> memories_;
};

}  // namespace tandem

#endif  // TANDEM_COMMON_WEIGHTS_GPU_GPU_INTAKE_H_
