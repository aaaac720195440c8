// Products of libtorch that a GPU alone computes without a wait.
#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <torch/library.h>

#include <cstdint>
#include <optional>

#include "tests/gpu/simulated/graph.h"
#include "tests/gpu/simulated/host_bytes.h"
#include "tests/gpu/simulated/stream.h"

namespace tandem::simulated_gpu {
namespace {

using at::Tensor;

// Whether one of the last two dimensions is contiguous, and the other aligned to 16 bytes.
bool IsAligned(const Tensor& x) {
  const bool by_row = x.stride(-1) == 1;
  const int64_t stride = by_row ? x.stride(-2) : x.stride(-1);
  return (by_row || x.stride(-2) == 1) && stride >= x.size(by_row ? -1 : -2) && stride % 8 == 0 &&
         x.storage_offset() % 8 == 0;
}

// Rows a [N, in] that are sorted by group, and the matrices b [groups, in, out]; `ends` are those
// of the groups' rows. Rows behind the last end are not written.
Tensor GroupedMm(const Tensor& a_in, const Tensor& b_in, const std::optional<Tensor>& ends_in,
                 const std::optional<Tensor>& bias, std::optional<at::ScalarType> type) {
  TORCH_CHECK(a_in.dim() == 2 && b_in.dim() == 3 && ends_in.has_value() && !bias.has_value() &&
                  !type.has_value(),
              "grouped mm: this form is not simulated");
  TORCH_CHECK(a_in.scalar_type() == at::kBFloat16 && b_in.scalar_type() == at::kBFloat16 &&
                  a_in.size(1) == b_in.size(1),
              "grouped mm: operands do not fit");
  TORCH_CHECK(IsAligned(a_in) && IsAligned(b_in) && b_in.stride(0) % 8 == 0,
              "grouped mm: strides are not multiples of 16 bytes");
  TORCH_CHECK(ends_in->is_cuda() && ends_in->dim() == 1 && ends_in->scalar_type() == at::kInt &&
                  ends_in->size(0) == b_in.size(0),
              "grouped mm: offsets must be int32 on the device");
  const at::DisableRecordFunctionGuard unseen;
  const Tensor a = OnCpu(a_in), b = OnCpu(b_in), ends = OnCpu(*ends_in);
  Tensor y = at::empty({a.size(0), b.size(2)}, a_in.options());
  Launch({a_in, b_in, *ends_in}, {y});
  const auto multiply = [a, b, ends, result = OnCpu(y)] {
    int64_t begin = 0;
    for (int64_t group = 0; group < b.size(0); ++group) {
      const int64_t end = ends.const_data_ptr<int32_t>()[group];
      result.narrow(0, begin, end - begin)
          .copy_(at::mm(a.narrow(0, begin, end - begin).to(at::kFloat), b[group].to(at::kFloat)));
      begin = end;
    }
  };
  multiply();
  Record(multiply);
  return y;
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) { library.impl("_grouped_mm", &GroupedMm); }

}  // namespace
}  // namespace tandem::simulated_gpu
