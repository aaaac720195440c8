#include "common/weights/weights_digest.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "common/base/status_macros.h"

namespace tandem {
namespace {

// 64 MiB of float32 on the device: the wait for the device takes little time beside the copy.
constexpr int64_t kMaxPackedValues = int64_t{1} << 24;

// Values that are packed for their copy to the host.
class Pack {
 public:
  Pack(int64_t max_values, ValuesVisitor visit) : max_values_(max_values), visit_(visit) {}

  // Packs the values as float32 on the tensor's device.
  absl::Status Add(const at::Tensor& tensor) {
    const at::Tensor values = tensor.to(at::kFloat).flatten();
    if (used_ + values.numel() > max_values_) TANDEM_RETURN_IF_ERROR(Send());
    if (values.numel() > max_values_) return visit_(values.cpu());
    if (!buffer_.defined()) buffer_ = at::empty({max_values_}, values.options());
    buffer_.narrow(0, used_, values.numel()).copy_(values);
    used_ += values.numel();
    return absl::OkStatus();
  }

  absl::Status Send() {
    if (used_ == 0) return absl::OkStatus();
    const at::Tensor values = buffer_.narrow(0, 0, used_).cpu();
    used_ = 0;
    return visit_(values);
  }

 private:
  const int64_t max_values_;
  const ValuesVisitor visit_;
  at::Tensor buffer_;
  int64_t used_ = 0;
};

}  // namespace

void WeightsHasher::Add(const at::Tensor& tensor) {
  const at::NoGradGuard no_grad;
  // No copy where the values are float32 on the host already.
  const at::Tensor values = tensor.detach().cpu().to(at::kFloat).contiguous();
  checksum_.Update(values.const_data_ptr(), values.nbytes());
}

absl::StatusOr<std::string> WeightsDigest(TensorSource source) {
  WeightsHasher hasher;
  TANDEM_RETURN_IF_ERROR(VisitOnHost(source, [&](const at::Tensor& values) {
    hasher.Add(values);
    return absl::OkStatus();
  }));
  return hasher.Hex();
}

std::string WeightsDigest(const NamedTensors& tensors) { return *WeightsDigest(SourceOf(tensors)); }

absl::Status VisitOnHost(TensorSource source, ValuesVisitor visit) {
  Pack pack(kMaxPackedValues, visit);
  TANDEM_RETURN_IF_ERROR(source([&](const std::string&, const at::Tensor& tensor) -> absl::Status {
    const at::NoGradGuard no_grad;
    if (!tensor.is_cpu()) return pack.Add(tensor.detach());
    TANDEM_RETURN_IF_ERROR(pack.Send());
    return visit(tensor.detach().to(at::kFloat).contiguous());
  }));
  return pack.Send();
}

absl::Status VisitPacked(TensorSource source, int64_t max_values, ValuesVisitor visit) {
  Pack pack(max_values, visit);
  TANDEM_RETURN_IF_ERROR(source([&](const std::string&, const at::Tensor& tensor) {
    const at::NoGradGuard no_grad;
    return pack.Add(tensor.detach());
  }));
  return pack.Send();
}

}  // namespace tandem
