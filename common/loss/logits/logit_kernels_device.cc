#include <ATen/ATen.h>

#include "common/loss/logits/logit_kernels.h"
#include "common/ops/device_kernels.h"
#include "common/ops/logit_statistics.h"
#include "common/ops/ops.h"

namespace tandem::loss {
namespace {

const float* Data(const at::Tensor& x) { return x.defined() ? x.const_data_ptr<float>() : nullptr; }

void Statistics(const LogitTile& tile, const RowStatistics& rows) {
  ops::LogitStatistics(tile.logits, tile.scales, tile.labels, tile.first_label, rows.max, rows.sum,
                       rows.weighted, rows.label);
}

void Gradient(const LogitTile& tile, const RowGradients& rows, at::ScalarType type) {
  const at::Device device = tile.logits.device();
  ops::Launch("output loss", device, ops::DeviceKernelsOf(device).logit_gradient,
              {.logits = tile.logits.mutable_data_ptr<float>(),
               .scales = Data(tile.scales),
               .labels = tile.labels.const_data_ptr<int64_t>(),
               .first_label = tile.first_label,
               .rows = tile.logits.size(0),
               .width = tile.logits.size(1),
               .max = Data(rows.max),
               .constants = Data(rows.constants),
               .slopes = Data(rows.slopes),
               .at_label = Data(rows.at_label),
               .bfloat16 = type == at::kBFloat16,
               .soft_cap = static_cast<float>(tile.soft_cap.value_or(0))});
}

int64_t ScratchBytes(int64_t /*tile_bytes*/) { return 0; }

}  // namespace

const LogitKernels kDeviceLogitKernels = {Statistics, Gradient, ScratchBytes};

const LogitKernels* OwnLogitKernels(at::Device device, at::ScalarType logits_type) {
  if (logits_type != at::kFloat || ops::GetKernelPath() != ops::KernelPath::kAuto) return nullptr;
  if (device.is_cpu()) return &kCpuLogitKernels;
  return ops::HasLogitStatistics(device, logits_type) ? &kDeviceLogitKernels : nullptr;
}

}  // namespace tandem::loss
