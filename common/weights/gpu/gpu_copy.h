// A copy of weights in memory of a GPU, as the byte stream of a transfer (weight_transfer.h): for
// receivers with GPUs of the same machine, which copy it from there.
#ifndef TANDEM_COMMON_WEIGHTS_GPU_GPU_COPY_H_
#define TANDEM_COMMON_WEIGHTS_GPU_GPU_COPY_H_

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/base/machine/gpu_memory.h"
#include "common/tensor/weight_spec.h"
#include "common/weights/weights_digest.h"
#include "common/weights/word_sums.h"

namespace tandem {

// Where copies may be, and the most bytes that they may take there.
struct GpuPlace {
  c10::Device device;
  int64_t most_bytes;
};

// Made by one thread; then immutable, and Read is thread-safe.
class GpuCopy {
 public:
  // Allocates memory for `tensors`, one behind the other, which outlive the copy; that of the last
  // released copy, if it has the size. RESOURCE_EXHAUSTED if it takes, with the copies that live,
  // more than `place.most_bytes`, or where memory runs out; errors of ShareMemory.
  static absl::StatusOr<std::unique_ptr<GpuCopy>> Make(const std::vector<WeightSpec>& tensors,
                                                       const GpuPlace& place);
  ~GpuCopy();
  GpuCopy(const GpuCopy&) = delete;
  GpuCopy& operator=(const GpuCopy&) = delete;

  // Copies a tensor, of any device, to tensors [first, last), which are it in several types, and
  // adds up what it copies. The host does not wait. May throw c10::Error.
  void Add(size_t first, size_t last, const at::Tensor& tensor);
  // Waits for all tensors. Errors of ShareMemory; may throw c10::Error.
  absl::Status Finish();

  // After Finish: the digest of the model's tensors as float32, and the sums of each tensor as it
  // was copied; empty if all are float32, whose digest is known.
  const std::string& ModelDigest() const { return model_digest_; }
  const std::vector<WordSums>& sums() const { return sums_; }
  // The copy, for other processes.
  const GpuMemory& memory() const { return memory_; }
  // Copies bytes [offset, offset + out.size()) to the host, on a stream of its own.
  absl::Status Read(int64_t offset, absl::Span<std::byte> out) const;

 private:
  GpuCopy(const std::vector<WeightSpec>& tensors, at::Tensor bytes, GpuMemory memory);

  const std::vector<WeightSpec>& tensors_;
  at::Tensor bytes_;
  GpuMemory memory_;
  std::vector<int64_t> begins_;          // of each tensor
  std::vector<at::Tensor> device_sums_;  // of each tensor, int64 [2]; empty if all are float32
  WeightsHasher model_;
  std::vector<WordSums> sums_;
  std::string model_digest_;
};

}  // namespace tandem

#endif  // TANDEM_COMMON_WEIGHTS_GPU_GPU_COPY_H_
