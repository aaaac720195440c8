#include "common/tensor/aten/host_copies.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <utility>

#include "common/base/errors/status_macros.h"

namespace tandem {
namespace {

constexpr int64_t kAlignment = 64;  // of a copy in its buffer, in bytes

int64_t Aligned(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

}  // namespace

absl::Status HostCopies::Add(const at::Tensor& tensor, at::ScalarType type, Reader reader) {
  TANDEM_RETURN_IF_ERROR(status_);
  const at::NoGradGuard no_grad;
  if (tensor.is_cpu() && !stage_all_) {
    TANDEM_RETURN_IF_ERROR(Finish());
    return status_ = reader(tensor.detach().to(type).contiguous().view({-1}));
  }
  const at::Tensor values = tensor.detach().reshape({-1});
  const int64_t most =
      std::max<int64_t>(buffer_bytes_ / static_cast<int64_t>(c10::elementSize(type)), int64_t{1});
  for (int64_t begin = 0; begin < values.numel(); begin += most) {
    const at::Tensor some = values.narrow(0, begin, std::min(most, values.numel() - begin));
    TANDEM_RETURN_IF_ERROR(Queue(some, type, reader));
  }
  return absl::OkStatus();
}

absl::Status HostCopies::Queue(const at::Tensor& values, at::ScalarType type,
                               const Reader& reader) {
  const int64_t bytes = values.numel() * static_cast<int64_t>(c10::elementSize(type));
  if (Aligned(buffers_[filling_].used) + bytes > buffer_bytes_ && buffers_[filling_].used > 0) {
    TANDEM_RETURN_IF_ERROR(Turn());
  }
  Buffer& buffer = buffers_[filling_];
  if (!buffer.bytes.defined()) {
    const int64_t size = std::max<int64_t>(buffer_bytes_, sizeof(double));
    buffer.bytes =
        at::empty({size}, at::TensorOptions().dtype(at::kByte).pinned_memory(!values.is_cpu()));
    if (!values.is_cpu()) buffer.copied.emplace(values.device().type());
  }
  const int64_t begin = Aligned(buffer.used);
  const at::Tensor to = buffer.bytes.narrow(0, begin, bytes).view(type);
  // Converted on the device: a copy that converts on its way would wait in pageable memory.
  to.copy_(values.to(type), /*non_blocking=*/true);
  buffer.used = begin + bytes;
  buffer.copies.push_back(
      {.begin = begin, .count = values.numel(), .type = type, .reader = reader});
  if (buffer.copied.has_value()) {
    const c10::impl::VirtualGuardImpl device(values.device().type());
    buffer.copied->record(device.getStream(values.device()));
  }
  return absl::OkStatus();
}

absl::Status HostCopies::Turn() {
  filling_ = 1 - filling_;
  return Read(buffers_[filling_]);
}

absl::Status HostCopies::Read(Buffer& buffer) {
  if (!buffer.copies.empty() && buffer.copied.has_value()) buffer.copied->synchronize();
  buffer.used = 0;
  for (const Copy& copy : std::exchange(buffer.copies, {})) {
    const int64_t bytes = copy.count * static_cast<int64_t>(c10::elementSize(copy.type));
    status_ = copy.reader(buffer.bytes.narrow(0, copy.begin, bytes).view(copy.type));
    TANDEM_RETURN_IF_ERROR(status_);
  }
  return absl::OkStatus();
}

absl::Status HostCopies::Finish() {
  TANDEM_RETURN_IF_ERROR(status_);
  TANDEM_RETURN_IF_ERROR(Read(buffers_[1 - filling_]));
  return Read(buffers_[filling_]);
}

}  // namespace tandem
