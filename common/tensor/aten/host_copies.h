// Copies of tensors on the host, for readers of bytes: digests, streams, files.
#ifndef TANDEM_COMMON_TENSOR_ATEN_HOST_COPIES_H_
#define TANDEM_COMMON_TENSOR_ATEN_HOST_COPIES_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "absl/status/status.h"

namespace tandem {

// Copies tensors to the host in order and gives them to readers, so that the device copies while
// the host reads. Values travel through two pinned buffers: the copies into one are queued on the
// device's current stream while the values of the other are read. Pinned memory takes the full
// rate of the bus (55 GB/s on an H100), pageable memory a fortieth of it.
//
//   HostCopies copies;
//   for (const auto& [name, tensor] : tensors) {
//     TANDEM_RETURN_IF_ERROR(copies.Add(tensor, at::kFloat, [&](const at::Tensor& values) {
//       hash.Update(values.const_data_ptr(), values.nbytes());
//       return absl::OkStatus();
//     }));
//   }
//   TANDEM_RETURN_IF_ERROR(copies.Finish());
//
// Not thread-safe. Methods may throw c10::Error as libtorch does.
class HostCopies {
 public:
  // Reads consecutive values of a tensor: one-dimensional, contiguous, on the host, and valid
  // during the call.
  using Reader = std::function<absl::Status(const at::Tensor& values)>;

  static constexpr int64_t kBufferBytes = 64 << 20;

  // `stage_all` sends tensors of the host through the buffers too, for tests on machines without a
  // device. The buffers are allocated when the first tensor needs them.
  explicit HostCopies(int64_t buffer_bytes = kBufferBytes, bool stage_all = false)
      : buffer_bytes_(buffer_bytes), stage_all_(stage_all) {}
  HostCopies(const HostCopies&) = delete;
  HostCopies& operator=(const HostCopies&) = delete;

  // Queues a copy of `tensor` with its values converted to `type`. `reader` sees all of them in
  // order, in one call or several, after the values of the tensors before and before Finish
  // returns: perhaps now, perhaps in a later call. The tensor's memory may be overwritten by later
  // work on the device's current stream, or freed, as soon as Add returns. A tensor on the host is
  // read at once, without a copy where it is contiguous and of `type`. All tensors of a device are
  // on the same one. Returns the first error of a reader, after which nothing more is read.
  absl::Status Add(const at::Tensor& tensor, at::ScalarType type, Reader reader);

  // Waits for the copies that are in flight, and has all of them read.
  absl::Status Finish();

 private:
  // Values in a buffer, from the byte `begin` on.
  struct Copy {
    int64_t begin, count;
    at::ScalarType type;
    Reader reader;
  };
  struct Buffer {
    at::Tensor bytes;  // pinned where the tensors are on a device
    int64_t used = 0;
    std::vector<Copy> copies = {};
    std::optional<c10::Event> copied = std::nullopt;  // the device has made the copies
  };

  absl::Status Queue(const at::Tensor& values, at::ScalarType type, const Reader& reader);
  // Marks the buffer that is being filled as complete, and goes on with the other one, whose copies
  // are read first.
  absl::Status Turn();
  // Waits for the copies of a buffer, reads them, and empties it.
  absl::Status Read(Buffer& buffer);

  const int64_t buffer_bytes_;
  const bool stage_all_;
  std::array<Buffer, 2> buffers_;
  size_t filling_ = 0;  // the index of the buffer that copies go into
  absl::Status status_;
};

}  // namespace tandem

#endif  // TANDEM_COMMON_TENSOR_ATEN_HOST_COPIES_H_
