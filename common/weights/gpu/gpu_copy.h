// A copy of weights in memory of a GPU, as consecutive bytes of the stream of a transfer
// (weight_transfer.h): for receivers with GPUs of the same machine, which copy it from there.
#ifndef TANDEM_COMMON_WEIGHTS_GPU_GPU_COPY_H_
#define TANDEM_COMMON_WEIGHTS_GPU_GPU_COPY_H_

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/base/machine/gpu_memory.h"
#include "common/tensor/aten/named_tensors.h"
#include "common/tensor/weight_spec.h"
#include "common/weights/weights_digest.h"
#include "common/weights/word_sums.h"

namespace tandem {

// The sums of copied tensors, in their order.
struct CopySums {
  std::vector<WordSums> sums;        // of each tensor as it was copied
  std::vector<WordSums> model_sums;  // of each of the model as float32, with its first type
};

// Where copies may be, and the most bytes that they may take there.
struct GpuPlace {
  c10::Device device;
  int64_t most_bytes;
};

// Made by one thread; then immutable, and Read is thread-safe.
class GpuCopy {
 public:
  // Allocates memory for `tensors`, one behind the other and at least one; that of the last
  // released copy, if it has the size. `with_sums`: adds up what it copies. RESOURCE_EXHAUSTED if
  // it takes, with the copies that live, more than `place.most_bytes`, or where memory runs out;
  // errors of ShareMemory.
  static absl::StatusOr<std::unique_ptr<GpuCopy>> Make(std::vector<WeightSpec> tensors,
                                                       const GpuPlace& place, bool with_sums);
  ~GpuCopy();
  GpuCopy(const GpuCopy&) = delete;
  GpuCopy& operator=(const GpuCopy&) = delete;

  // Copies the tensors that `source` gives, of any device, and waits for them. Errors of `source`,
  // VisitTensors and ShareMemory; may throw c10::Error.
  absl::Status Fill(TensorSource source);

  // After Fill; empty without sums.
  const CopySums& sums() const { return sums_; }
  c10::Device device() const { return bytes_.device(); }
  // The copy, for other processes.
  const GpuMemory& memory() const { return memory_; }
  // Copies bytes [offset, offset + out.size()) to the host, on the current stream. May throw
  // c10::Error.
  void Read(int64_t offset, absl::Span<std::byte> out) const;

 private:
  GpuCopy(std::vector<WeightSpec> tensors, at::Tensor bytes, GpuMemory memory, bool with_sums);

  // Copies a tensor to tensors [first, last), which are it in several types. The host does not
  // wait.
  void Add(size_t first, size_t last, const at::Tensor& tensor);
  void ReadSums();

  const std::vector<WeightSpec> tensors_;
  at::Tensor bytes_;
  GpuMemory memory_;
  std::vector<int64_t> begins_;          // of each tensor
  std::vector<at::Tensor> device_sums_;  // of each tensor, int64 [2]; empty without sums
  WeightsHasher model_;
  CopySums sums_;
};

}  // namespace tandem

#endif  // TANDEM_COMMON_WEIGHTS_GPU_GPU_COPY_H_
