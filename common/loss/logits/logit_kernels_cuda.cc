#include <ATen/ATen.h>
#include <c10/cuda/CUDAStream.h>

#include "common/kernels/cuda/cuda_kernels.h"
#include "common/loss/logits/logit_kernels.h"

namespace tandem::loss {
namespace {

const float* Data(const at::Tensor& x) { return x.defined() ? x.const_data_ptr<float>() : nullptr; }

void Check(cudaError_t error) {
  TORCH_CHECK(error == cudaSuccess, "CUDA kernel of the output loss: ", cudaGetErrorString(error));
}

cudaStream_t StreamOf(const LogitTile& tile) {
  return c10::cuda::getCurrentCUDAStream(tile.logits.device().index()).stream();
}

void Statistics(const LogitTile& tile, const RowStatistics& rows) {
  Check(kernels::LogitStatisticsCuda({.logits = Data(tile.logits),
                                      .scales = Data(tile.scales),
                                      .labels = tile.labels.const_data_ptr<int64_t>(),
                                      .first_label = tile.first_label,
                                      .rows = tile.logits.size(0),
                                      .width = tile.logits.size(1),
                                      .max = rows.max.mutable_data_ptr<float>(),
                                      .sum = rows.sum.mutable_data_ptr<float>(),
                                      .weighted = rows.weighted.mutable_data_ptr<float>(),
                                      .label = rows.label.mutable_data_ptr<float>()},
                                     StreamOf(tile)));
}

void Gradient(const LogitTile& tile, const RowGradients& rows, at::ScalarType type) {
  Check(kernels::LogitGradientCuda({.logits = tile.logits.mutable_data_ptr<float>(),
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
                                    .soft_cap = static_cast<float>(tile.soft_cap.value_or(0))},
                                   StreamOf(tile)));
}

int64_t ScratchBytes(int64_t /*tile_bytes*/) { return 0; }

}  // namespace

const LogitKernels kCudaLogitKernels = {Statistics, Gradient, ScratchBytes};

}  // namespace tandem::loss
