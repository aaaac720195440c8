// Memory of GPUs that processes of a machine share: some describe it, another one copies from it to
// its own GPU.
//
//   const GpuMemory shared = *ShareMemory(bytes);              // sent to the other process
//   const auto memory = *PeerMemory::Open({shared}, device);   // there
//   memory->CopyTo(offset, tensor);
#ifndef TANDEM_COMMON_TENSOR_ATEN_PEER_MEMORY_H_
#define TANDEM_COMMON_TENSOR_ATEN_PEER_MEMORY_H_

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/base/files/shared_bytes.h"
#include "common/base/machine/gpu_memory.h"

namespace tandem {

// Returns the UUID of a GPU, which no other GPU of this machine has.
std::string GpuUuid(c10::Device device);

// Whether this build, and the library of its devices, can share memory of `device`.
bool CanShareMemory(c10::Device device);

// Describes `bytes` for another process, which sees what is written there, whenever that is, for as
// long as the memory lives. `bytes` is of one byte an element and fills an allocation of its own.
// The host must have waited for what is to be read. UNIMPLEMENTED where CanShareMemory is false;
// INTERNAL where libtorch's allocator cannot share its memory.
absl::StatusOr<GpuMemory> ShareMemory(const at::Tensor& bytes);

// Memories of other processes, as bytes one behind the other. A copy that was queued must have
// ended before the object does.
class PeerMemory : public SharedBytes {
 public:
  // Opens all memories for copies to `device`, or none. FAILED_PRECONDITION for memory of another
  // machine, or of a GPU that `device` cannot access; UNIMPLEMENTED where CanShareMemory is false;
  // INTERNAL with the text of the library that cannot open it.
  static absl::StatusOr<std::shared_ptr<const PeerMemory>> Open(absl::Span<const GpuMemory> shared,
                                                                c10::Device device);

  // Queues a copy of the bytes from `offset` on to `bytes`, which is contiguous, has one byte an
  // element and is on the device, on the current stream. DATA_LOSS for bytes beyond the end; may
  // throw c10::Error.
  absl::Status CopyTo(int64_t offset, const at::Tensor& bytes) const;
  // Through memory of the device, on its current stream.
  absl::Status Read(int64_t offset, absl::Span<std::byte> out) const override;
  bool on_gpu() const override { return true; }
  // The descriptions by which further processes open the memories, too.
  const std::vector<GpuMemory>& shared() const { return shared_; }
  c10::Device device() const { return device_; }

 protected:
  PeerMemory(std::vector<GpuMemory> shared, c10::Device device);

 private:
  virtual void Copy(int64_t offset, const at::Tensor& bytes) const = 0;

  const std::vector<GpuMemory> shared_;
  const c10::Device device_;
  const int64_t size_;  // of all memories
};

}  // namespace tandem

#endif  // TANDEM_COMMON_TENSOR_ATEN_PEER_MEMORY_H_
