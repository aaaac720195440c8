#include "common/weights/gpu/gpu_intake.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <cstdint>
#include <limits>

#include "common/base/errors/status_macros.h"
#include "common/tensor/aten/aten_bytes.h"
#include "common/tensor/aten/peer_memory.h"
#include "common/weights/weights_digest.h"

namespace tandem {
namespace {

constexpr int64_t kAllFinite = std::numeric_limits<int64_t>::max();

}  // namespace

at::Tensor FirstNotFiniteOnDevice(const at::Tensor& values) {
  const at::Tensor all = values.reshape({-1});
  const auto options = values.options().dtype(at::kLong);
  const at::Tensor none = at::full({}, kAllFinite, options);
  at::Tensor first = none;
  for (int64_t begin = 0; begin < all.numel(); begin += kDeviceValuesAtATime) {
    const int64_t count = std::min(kDeviceValuesAtATime, all.numel() - begin);
    const at::Tensor wrong = at::isfinite(all.narrow(0, begin, count)).logical_not_();
    // argmax returns the first of several largest values.
    const at::Tensor place = wrong.to(at::kByte).argmax().add_(begin);
    first = at::minimum(first, at::where(wrong.any(), place, none));
  }
  return first;
}

GpuIntake::~GpuIntake() {
  if (memories_.empty()) return;
  try {
    c10::impl::VirtualGuardImpl(stream_.device_type()).synchronizeStream(stream_);
  } catch (const c10::Error&) {
    // The device is lost, and every later operation says so. Closing the memory would throw, too.
    static_cast<void>(new auto(std::move(memories_)));
  }
}

absl::Status GpuIntake::Take(const WeightSpec& spec, absl::Span<const SharedRange> ranges,
                             absl::FunctionRef<absl::Status(const at::Tensor& tensor)> use) {
  const at::NoGradGuard no_grad;
  const c10::Device device = stream_.device();
  // The memory that `use` fills may have been that of work on the default stream.
  c10::Event before(device.type());
  before.record(c10::impl::VirtualGuardImpl(device.type()).getDefaultStream(device));
  before.block(stream_);
  const c10::StreamGuard guard(stream_);
  const at::Tensor bytes = at::empty({spec.bytes()}, at::device(device).dtype(at::kByte));
  int64_t begin = 0;
  for (const SharedRange& range : ranges) {
    memories_.insert(range.from);
    TANDEM_RETURN_IF_ERROR(dynamic_cast<const PeerMemory&>(*range.from)
                               .CopyTo(range.offset, bytes.narrow(0, begin, range.size)));
    begin += range.size;
  }
  const at::Tensor tensor = bytes.view(ToScalarType(spec.dtype)).view(spec.shape);
  pending_.emplace_back(
      spec.name, at::cat({SumBytesOnDevice(0, tensor), FirstNotFiniteOnDevice(tensor).view({1})}));
  return use(tensor);
}

std::vector<ReadTensor> GpuIntake::TakeRead() {
  std::vector<ReadTensor> read;
  if (pending_.empty()) return read;
  const at::NoGradGuard no_grad;
  const c10::StreamGuard guard(stream_);
  std::vector<at::Tensor> found;
  for (const auto& [name, tensor] : pending_) found.push_back(tensor);
  const at::Tensor host = at::stack(found).cpu();  // waits for all that the stream had to do
  memories_.clear();
  const auto* values = host.const_data_ptr<int64_t>();
  for (const auto& [name, tensor] : pending_) {
    ReadTensor& taken = read.emplace_back();
    taken.name = name;
    taken.sums = {.first = static_cast<uint64_t>(values[0]),
                  .second = static_cast<uint64_t>(values[1])};
    if (values[2] != kAllFinite) taken.not_finite = values[2];
    values += 3;
  }
  pending_.clear();
  return read;
}

}  // namespace tandem
