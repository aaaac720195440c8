#include "common/ops/logit_statistics.h"

#include <ATen/ATen.h>

#include "common/ops/device_kernels.h"

namespace tandem::ops {

bool HasLogitStatistics(at::Device device, at::ScalarType type) {
  return type == at::kFloat && DeviceKernelsOf(device).logit_statistics != nullptr;
}

void LogitStatistics(const at::Tensor& logits, const at::Tensor& scales, const at::Tensor& labels,
                     int64_t first_label, const at::Tensor& max, const at::Tensor& sum,
                     const at::Tensor& weighted, const at::Tensor& label) {
  const at::Device device = logits.device();
  Launch("statistics of logits", device, DeviceKernelsOf(device).logit_statistics,
         {.logits = logits.const_data_ptr<float>(),
          .scales = scales.defined() ? scales.const_data_ptr<float>() : nullptr,
          .labels = labels.const_data_ptr<int64_t>(),
          .first_label = first_label,
          .rows = logits.size(0),
          .width = logits.size(1),
          .max = max.mutable_data_ptr<float>(),
          .sum = sum.mutable_data_ptr<float>(),
          .weighted = weighted.mutable_data_ptr<float>(),
          .label = label.mutable_data_ptr<float>()});
}

}  // namespace tandem::ops
