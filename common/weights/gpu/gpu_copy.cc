#include "common/weights/gpu/gpu_copy.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/errors/status_macros.h"
#include "common/tensor/aten/aten_bytes.h"
#include "common/tensor/aten/catch_torch_errors.h"
#include "common/tensor/aten/peer_memory.h"
#include "common/weights/copied_tensors.h"
#include "common/weights/weight_components.h"

namespace tandem {
namespace {

constexpr int64_t kWordBytes = 4;

// Keeps the memory of the last released copy for the next one of its size, so that memory which
// another process may still have open is not freed from one publication to the next.
class SpareMemory {
 public:
  static SpareMemory& Get() {
    static auto* const spare = new SpareMemory;
    return *spare;
  }

  at::Tensor Take(int64_t bytes, c10::Device device) {
    at::Tensor spare = Exchange({});
    if (spare.defined() && spare.numel() == bytes && spare.device() == device) return spare;
    spare.reset();  // its memory may be needed
    const c10::DeviceGuard guard(device);
    return at::empty({bytes}, at::device(device).dtype(at::kByte));
  }

  void Return(at::Tensor bytes) { Exchange(std::move(bytes)); }

 private:
  at::Tensor Exchange(at::Tensor bytes) {
    const std::lock_guard lock(mutex_);
    return std::exchange(bytes_, std::move(bytes));
  }

  std::mutex mutex_;
  at::Tensor bytes_;
};

// Bytes of the copies that live: publications may overlap.
std::atomic<int64_t> bytes_in_use = 0;

}  // namespace

absl::StatusOr<std::unique_ptr<GpuCopy>> GpuCopy::Make(std::vector<WeightSpec> tensors,
                                                       const GpuPlace& place, bool with_sums) {
  int64_t total = 0;
  for (const WeightSpec& tensor : tensors) total += tensor.bytes();
  if (total > place.most_bytes - bytes_in_use) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "a copy of the weights takes ", total, " bytes of the GPU's memory, of which ",
        place.most_bytes, " are planned for copies, and others have ", bytes_in_use.load()));
  }
  return CatchTorchErrors("copy of the weights", [&]() -> absl::StatusOr<std::unique_ptr<GpuCopy>> {
    at::Tensor bytes = SpareMemory::Get().Take(total, place.device);
    TANDEM_ASSIGN_OR_RETURN(GpuMemory memory, ShareMemory(bytes));
    return std::unique_ptr<GpuCopy>(
        new GpuCopy(std::move(tensors), std::move(bytes), std::move(memory), with_sums));
  });
}

GpuCopy::GpuCopy(std::vector<WeightSpec> tensors, at::Tensor bytes, GpuMemory memory,
                 bool with_sums)
    : tensors_(std::move(tensors)), bytes_(std::move(bytes)), memory_(std::move(memory)) {
  bytes_in_use += bytes_.numel();
  int64_t begin = 0;
  for (const WeightSpec& tensor : tensors_) {
    begins_.push_back(std::exchange(begin, begin + tensor.bytes()));
    if (with_sums) device_sums_.push_back(at::zeros({2}, bytes_.options().dtype(at::kLong)));
  }
}

GpuCopy::~GpuCopy() {
  bytes_in_use -= bytes_.numel();
  SpareMemory::Get().Return(std::move(bytes_));
}

void GpuCopy::Add(size_t first, size_t last, const at::Tensor& tensor) {
  const at::NoGradGuard no_grad;
  const at::Tensor all = tensor.detach().reshape({-1});
  const bool of_model = ComponentOf(tensors_[first]) == kModelComponent;
  for (int64_t begin = 0; begin < all.numel(); begin += kDeviceValuesAtATime) {
    const int64_t count = std::min(kDeviceValuesAtATime, all.numel() - begin);
    const at::Tensor values =
        all.narrow(0, begin, count).to(bytes_.device()).to(at::kFloat).contiguous();
    if (!device_sums_.empty() && of_model) {
      model_.AddRows(tensors_[first].name, begin, 0, values.unsqueeze(0));
    }
    for (size_t i = first; i < last; ++i) {
      const at::Tensor converted = values.to(ToScalarType(tensors_[i].dtype));
      const auto item = static_cast<int64_t>(converted.element_size());
      if (!device_sums_.empty()) {
        device_sums_[i].add_(SumBytesOnDevice(begin * item / kWordBytes, converted));
      }
      // As bytes: a tensor may begin at any even place.
      bytes_.narrow(0, begins_[i] + begin * item, count * item).copy_(converted.view(at::kByte));
    }
  }
}

void GpuCopy::ReadSums() {
  if (device_sums_.empty()) return;
  const at::Tensor host = at::stack(std::exchange(device_sums_, {})).cpu();
  const auto* sums = host.const_data_ptr<int64_t>();
  const TensorSums& model = model_.Sums();
  for (size_t i = 0; i < tensors_.size(); ++i, sums += 2) {
    sums_.sums.push_back(
        {.first = static_cast<uint64_t>(sums[0]), .second = static_cast<uint64_t>(sums[1])});
    const bool first = i == 0 || tensors_[i].name != tensors_[i - 1].name;
    sums_.model_sums.push_back(first ? model.Of(tensors_[i].name) : WordSums());
  }
}

absl::Status GpuCopy::Fill(TensorSource source) {
  TANDEM_RETURN_IF_ERROR(
      VisitTensors(tensors_, source, [&](size_t first, size_t last, const at::Tensor& tensor) {
        Add(first, last, tensor);
        return absl::OkStatus();
      }));
  ReadSums();
  const c10::impl::VirtualGuardImpl device(bytes_.device().type());
  device.synchronizeStream(device.getStream(bytes_.device()));
  TANDEM_ASSIGN_OR_RETURN(memory_, ShareMemory(bytes_));
  return absl::OkStatus();
}

void GpuCopy::Read(int64_t offset, absl::Span<std::byte> out) const {
  const auto size = static_cast<int64_t>(out.size());
  at::from_blob(out.data(), {size}, at::dtype(at::kByte)).copy_(bytes_.narrow(0, offset, size));
}

}  // namespace tandem
