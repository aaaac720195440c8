// Memory of a GPU that two processes of a machine share: one describes it, the other one copies
// from it to its own GPU.
//
//   const GpuMemory shared = *ShareMemory(bytes);            // sent to the other process
//   const auto memory = *PeerMemory::Open(shared, device);   // there
//   memory->CopyTo(offset, tensor);
#ifndef TANDEM_COMMON_TENSOR_ATEN_PEER_MEMORY_H_
#define TANDEM_COMMON_TENSOR_ATEN_PEER_MEMORY_H_

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/base/files/shared_bytes.h"
#include "common/base/machine/gpu_memory.h"

namespace tandem {

// Whether this build, and the library of its devices, can share memory of `device`.
bool CanShareMemory(c10::Device device);

// Describes `bytes` for another process, which sees what is written there, whenever that is, for as
// long as the memory lives. `bytes` is of one byte an element and fills an allocation of its own.
// The host must have waited for what is to be read. UNIMPLEMENTED where CanShareMemory is false;
// INTERNAL where libtorch's allocator cannot share its memory.
absl::StatusOr<GpuMemory> ShareMemory(const at::Tensor& bytes);

// Memory of another process. A copy that was queued must have ended before the object does.
class PeerMemory : public SharedBytes {
 public:
  // Opens memory for copies to `device`. FAILED_PRECONDITION for memory of another machine, or of a
  // GPU that `device` cannot access; UNIMPLEMENTED where CanShareMemory is false; INTERNAL with the
  // text of the library that cannot open it.
  static absl::StatusOr<std::shared_ptr<const PeerMemory>> Open(const GpuMemory& shared,
                                                                c10::Device device);

  // Queues a copy of the bytes from `offset` on to `bytes`, which is contiguous, has one byte an
  // element and is on the device, on the current stream. DATA_LOSS for bytes beyond the end; may
  // throw c10::Error.
  absl::Status CopyTo(int64_t offset, const at::Tensor& bytes) const;
  // Through memory of the device, on its current stream.
  absl::Status Read(int64_t offset, absl::Span<std::byte> out) const override;
  bool on_gpu() const override { return true; }
  // The description by which further processes open the memory, too.
  const GpuMemory& shared() const { return shared_; }

 protected:
  PeerMemory(GpuMemory shared, c10::Device device) : shared_(std::move(shared)), device_(device) {}

 private:
  virtual void Copy(int64_t offset, const at::Tensor& bytes) const = 0;

  const GpuMemory shared_;
  const c10::Device device_;
};

}  // namespace tandem

#endif  // TANDEM_COMMON_TENSOR_ATEN_PEER_MEMORY_H_
