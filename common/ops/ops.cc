#include "common/ops/ops.h"

#include <ATen/ATen.h>
#include <ATen/OpMathType.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cmath>
#include <mutex>

#include "common/kernels/cpu/cpu_kernels.h"
#include "common/ops/attention/aten_attention.h"
#include "common/ops/attention/device_attention.h"
#include "common/ops/attention/shared_keys.h"
#include "common/ops/autograd_functions.h"
#include "common/ops/device_layers.h"
#include "common/ops/linear/linear_function.h"
#include "common/ops/packed.h"
#include "common/ops/products/fixed_rows.h"
#include "common/ops/products/parallel_linear.h"
#include "common/ops/threads/parallel_for.h"
#include "common/ops/threads/pass_memory.h"

namespace tandem::ops {
namespace {

bool HasCpuKernels(at::Device device, at::ScalarType type) {
  return device.is_cpu() && type == at::kFloat && kernels::GetCpuKernels().linear != nullptr;
}
bool HasCpuKernels(const at::Tensor& x) { return HasCpuKernels(x.device(), x.scalar_type()); }

bool UseCpuKernels(const at::Tensor& x) { return HasCpuKernels(x) && !at::GradMode::is_enabled(); }

// Whether autograd needs a function of its own around a layer's kernel.
bool HasKernelsWithGradient(const at::Tensor& x) {
  return at::GradMode::is_enabled() && (HasCpuKernels(x) || HasLayerKernels(x));
}

const float* Data(const at::Tensor& x) { return x.const_data_ptr<float>(); }
float* MutableData(const at::Tensor& x) { return x.mutable_data_ptr<float>(); }

// The whole map; x [T, in] and weight [out, in] have contiguous rows.
kernels::LinearArgs<float> WholeLinear(const at::Tensor& x, const at::Tensor& weight,
                                       const at::Tensor& bias, const at::Tensor& y,
                                       bool accumulate) {
  return {Data(x),         x.stride(0),    Data(weight), bias.defined() ? Data(bias) : nullptr,
          MutableData(y),  y.stride(0),    x.size(0),    x.size(1),
          /*out_begin=*/0, weight.size(0), accumulate};
}

void CheckLinear(const at::Tensor& x, const at::Tensor& weight) {
  TORCH_CHECK(x.dim() == 2 && weight.dim() == 2 && x.size(1) == weight.size(1), "linear: x ",
              x.sizes(), " against weight ", weight.sizes());
}

void LinearKernel(const at::Tensor& x_in, const at::Tensor& weight, const at::Tensor& bias,
                  const at::Tensor& y, bool accumulate) {
  CheckLinear(x_in, weight);
  const at::Tensor x = Packed(x_in);
  const at::Tensor w = weight.contiguous();
  ParallelLinear(WholeLinear(x, w, bias, y, accumulate), kernels::GetCpuKernels().linear);
}

// Where one sequence of a ragged batch has its keys and values.
template <typename Number>
struct AttentionSource {
  const Number* k;
  int64_t k_position_stride, k_head_stride;
  const Number* v;
  int64_t v_position_stride, v_head_stride;
  int64_t first_position;
  const int32_t* blocks = nullptr;  // as in AttentionArgs
  int64_t block_stride = 0;
};

void Attend(const kernels::AttentionArgs<float>& args) { kernels::GetCpuKernels().attention(args); }
void Attend(const kernels::AttentionArgs<uint16_t>& args) {
  kernels::GetCpuKernels().bfloat16_attention(args);
}

// Attention of q to the keys and values of type Number at source(s) for each sequence s.
template <typename Number, typename Source>
at::Tensor AttentionKernel(const at::Tensor& q, int64_t key_value_heads, int64_t value_dim,
                           const std::vector<int64_t>& offsets, const AttentionScores& scores,
                           const Source& source) {
  constexpr int64_t kRowsPerItem = 32;   // so that threads divide a long prompt
  constexpr int64_t kHeadsPerItem = 16;  // and the heads of one that share a key
  // Query heads [head, head + heads) of the rows [begin, end).
  struct Item {
    int64_t sequence, key_value_head, head, heads, begin, end;
  };
  const int64_t heads = q.size(1), head_dim = q.size(2), group = heads / key_value_heads;
  at::Tensor out = EmptyOnCpu({q.size(0), heads * value_dim});
  thread_local std::vector<Item> items;  // keeps its memory for the next pass
  items.clear();
  for (size_t s = 0; s + 1 < offsets.size(); ++s) {
    for (int64_t begin = offsets[s]; begin < offsets[s + 1]; begin += kRowsPerItem) {
      const int64_t end = std::min(begin + kRowsPerItem, offsets[s + 1]);
      for (int64_t head = 0; head < key_value_heads; ++head) {
        for (int64_t first = 0; first < group; first += kHeadsPerItem) {
          items.push_back({static_cast<int64_t>(s), head, head * group + first,
                           std::min(kHeadsPerItem, group - first), begin, end});
        }
      }
    }
  }
  const float scale = scores.scale.has_value() ? static_cast<float>(*scores.scale)
                                               : 1.0f / std::sqrt(static_cast<float>(head_dim));
  const auto run = [&, all = items.data()](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const Item& item = all[i];
      const AttentionSource<Number> from = source(item.sequence);
      Attend(kernels::AttentionArgs<Number>{
          Data(q) + item.begin * q.stride(0) + item.head * head_dim,
          q.stride(0),
          from.k + item.key_value_head * from.k_head_stride,
          from.k_position_stride,
          from.v + item.key_value_head * from.v_head_stride,
          from.v_position_stride,
          MutableData(out) + (item.begin * heads + item.head) * value_dim,
          heads * value_dim,
          item.end - item.begin,
          item.heads,
          head_dim,
          value_dim,
          from.first_position + item.begin - offsets[item.sequence],
          scale,
          from.blocks,
          from.block_stride,
          scores.window,
          static_cast<float>(scores.soft_cap.value_or(0)),
      });
    }
  };
  ParallelFor(static_cast<int64_t>(items.size()),
              std::min(group, kHeadsPerItem) * head_dim * kernels::kAttentionBlock, run);
  return out;
}

// Writes `count` numbers into the cache. bf16 is rounded to the nearest, ties to even.
void Append(float* to, const float* from, int64_t count) { std::copy_n(from, count, to); }
void Append(uint16_t* to, const float* from, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] = at::BFloat16(from[i]).x;
}

// CachedAttention with a cache of type Number, which is what the rows attend to, their own keys
// and values included: a row has the same bits whether the keys before it are new or old.
template <typename Number>
at::Tensor CachedAttentionKernel(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                 const std::vector<int64_t>& offsets,
                                 const PagedSequences& sequences, const at::Tensor& key_cache,
                                 const at::Tensor& value_cache, const AttentionScores& scores) {
  constexpr int64_t kTokens = kernels::kAttentionBlock;
  auto* const keys = static_cast<Number*>(key_cache.mutable_data_ptr());
  auto* const values = static_cast<Number*>(value_cache.mutable_data_ptr());
  const auto table = [&](size_t s) {
    return sequences.block_table.const_data_ptr<int32_t>() +
           static_cast<int64_t>(s) * sequences.block_table.size(1);
  };
  for (size_t s = 0; s < sequences.starts.size(); ++s) {
    for (int64_t row = offsets[s]; row < offsets[s + 1]; ++row) {
      const int64_t position = sequences.starts[s] + row - offsets[s];
      const int64_t block = table(s)[position / kTokens], place = position % kTokens;
      const auto append = [&](Number* numbers, const at::Tensor& cache, const at::Tensor& x) {
        for (int64_t head = 0; head < x.size(1); ++head) {
          Append(
              numbers + block * cache.stride(0) + head * cache.stride(1) + place * cache.stride(2),
              Data(x) + row * x.stride(0) + head * x.stride(1), x.size(2));
        }
      };
      append(keys, key_cache, k);
      append(values, value_cache, v);
    }
  }
  return AttentionKernel<Number>(q, k.size(1), v.size(2), offsets, scores, [&](int64_t sequence) {
    return AttentionSource<Number>{.k = keys,
                                   .k_position_stride = key_cache.stride(2),
                                   .k_head_stride = key_cache.stride(1),
                                   .v = values,
                                   .v_position_stride = value_cache.stride(2),
                                   .v_head_stride = value_cache.stride(1),
                                   .first_position = sequences.starts[sequence],
                                   .blocks = table(sequence),
                                   .block_stride = key_cache.stride(0)};
  });
}

// CausalAttention of sequences that share prefixes, to their keys and values in `blocks`
// (KeyValueBlocks).
at::Tensor SharedAttentionKernel(const at::Tensor& q, const at::Tensor& blocks, int64_t value_dim,
                                 const std::vector<int64_t>& offsets, const AttentionScores& scores,
                                 const SharedPrefixes& prefixes) {
  return AttentionKernel<float>(
      q, blocks.size(1), value_dim, offsets, scores, [&](int64_t sequence) {
        const auto s = static_cast<size_t>(sequence);
        return AttentionSource<float>{.k = Data(blocks),
                                      .k_position_stride = blocks.stride(0),
                                      .k_head_stride = blocks.stride(1),
                                      .v = Data(blocks) + q.size(2),
                                      .v_position_stride = blocks.stride(0),
                                      .v_head_stride = blocks.stride(1),
                                      .first_position = prefixes.start(s),
                                      .blocks = prefixes.blocks(s),
                                      .block_stride = blocks.stride(0)};
      });
}

// Calls every function of MKL's vector library that libtorch has, on one thread. A function's first
// call chooses its code, and in MKL 2024.2 a second thread that calls it meanwhile may compute with
// code of low accuracy (pytorch/pytorch#188792).
void ChooseVectorFunctions() {
  const at::NoGradGuard no_gradients;
  for (const at::ScalarType type : {at::kFloat, at::kDouble}) {
    const at::Tensor x = at::full({1}, 0.5, type);
    for (const auto function :
         {&at::acos, &at::asin, &at::atan, &at::cos, &at::erf, &at::erfc, &at::erfinv, &at::exp,
          &at::expm1, &at::lgamma, &at::log, &at::log10, &at::log1p, &at::log2, &at::sin, &at::sqrt,
          &at::tan, &at::tanh}) {
      function(x);
    }
  }
}

}  // namespace

void SetKernelPath(KernelPath path) {
  static std::once_flag chosen;
  std::call_once(chosen, ChooseVectorFunctions);
  kernels::UseCpuKernels(path == KernelPath::kAten ? &kernels::kAtenKernels : nullptr);
}

KernelPath GetKernelPath() {
  return &kernels::GetCpuKernels() == &kernels::kAtenKernels ? KernelPath::kAten
                                                             : KernelPath::kAuto;
}

at::Tensor Embedding(const at::Tensor& tokens, const at::Tensor& weight) {
  if (!UseCpuKernels(weight)) return at::embedding(weight, tokens);
  return SelectRows(weight, tokens);
}

at::Tensor SelectRows(const at::Tensor& x, const at::Tensor& rows) {
  if (!UseCpuKernels(x) || x.dim() != 2 || x.stride(1) != 1) return x.index_select(0, rows);
  const at::Tensor indices = rows.contiguous();
  const int64_t count = indices.numel(), width = x.size(1);
  const auto* const index = indices.const_data_ptr<int64_t>();
  at::Tensor selected = EmptyOnCpu({count, width});
  ParallelFor(count, width, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      TORCH_CHECK_INDEX(index[i] >= 0 && index[i] < x.size(0), "row ", index[i], " of ", x.size(0));
      std::copy_n(Data(x) + index[i] * x.stride(0), width, MutableData(selected) + i * width);
    }
  });
  return selected;
}

at::Tensor Add(const at::Tensor& residual, const at::Tensor& x) {
  if (!UseCpuKernels(x)) return residual + x;
  TORCH_CHECK(residual.sizes() == x.sizes() && residual.is_contiguous() && x.is_contiguous(),
              "sum of ", residual.sizes(), " and ", x.sizes());
  float* const sum = MutableData(residual);
  const float* const addend = Data(x);
  for (int64_t i = 0; i < x.numel(); ++i) sum[i] += addend[i];
  return residual;
}

at::Tensor Scale(const at::Tensor& x, double factor) {
  if (!UseCpuKernels(x)) return x * factor;
  TORCH_CHECK(x.is_contiguous(), "x must be contiguous");
  float* const values = MutableData(x);
  const auto scale = static_cast<float>(factor);
  for (int64_t i = 0; i < x.numel(); ++i) values[i] *= scale;
  return x;
}

at::Tensor Linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  if (!HasCpuKernels(x)) {
    if (ProductRows() == 0 || at::GradMode::is_enabled()) return at::linear(x, weight, bias);
    CheckLinear(x, weight);
    return LinearOfFixedRows(x, weight, bias, x.scalar_type());
  }
  if (at::GradMode::is_enabled()) {
    return DifferentiableLinear(x, weight, bias.defined() ? at::TensorList(bias) : at::TensorList(),
                                weight, bias);
  }
  at::Tensor y = EmptyOnCpu({x.size(0), weight.size(0)});
  LinearKernel(x, weight, bias, y, /*accumulate=*/false);
  return y;
}

void LinearOnThread(const at::Tensor& y, const at::Tensor& x, const at::Tensor& weight) {
  CheckLinear(x, weight);
  TORCH_CHECK(HasCpuKernels(x) && x.stride(-1) == 1 && weight.is_contiguous() && y.is_contiguous(),
              "linear on one thread: contiguous float32 on the CPU");
  kernels::GetCpuKernels().linear(WholeLinear(x, weight, {}, y, /*accumulate=*/false));
}

at::Tensor LinearAdd(const at::Tensor& residual, const at::Tensor& x, const at::Tensor& weight,
                     const at::Tensor& bias) {
  if (!UseCpuKernels(x)) return residual + Linear(x, weight, bias);
  LinearKernel(x, weight, bias, residual, /*accumulate=*/true);
  return residual;
}

at::Tensor RmsNorm(const at::Tensor& x_in, const at::Tensor& weight, double eps, double offset) {
  if (HasKernelsWithGradient(x_in)) return DifferentiableRmsNorm(x_in, weight, eps, offset);
  if (HasLayerKernels(x_in)) return DeviceRmsNorm(x_in, weight, eps, offset);
  if (!HasCpuKernels(x_in)) {
    const at::ScalarType type = at::toOpMathType(x_in.scalar_type());
    // The gradient passes the rounding unchanged, in the type of the weight.
    const at::Tensor wide = weight.to(type),
                     values = weight.detach().to(x_in.scalar_type()).to(type);
    const at::Tensor rounded = wide + (values - wide.detach());
    const at::Tensor factor = offset == 0 ? rounded : rounded + offset;
    return at::rms_norm(x_in.to(type), weight.sizes(), factor, eps).to(x_in.scalar_type());
  }
  const at::Tensor x = Packed(x_in);
  at::Tensor y = EmptyOnCpu(x.sizes());
  const int64_t width = x.size(-1);
  const int64_t inner = x.dim() == 3 ? x.size(1) : 1;  // heads
  const int64_t inner_stride = x.dim() == 3 ? x.stride(1) : 0;
  ParallelFor(x.size(0), inner * width, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      kernels::GetCpuKernels().rms_norm({Data(x) + row * x.stride(0), inner_stride, Data(weight),
                                         MutableData(y) + row * inner * width, width, inner, width,
                                         static_cast<float>(eps), static_cast<float>(offset)});
    }
  });
  return y;
}

at::Tensor RotaryEmbedding(const at::Tensor& x_in, const at::Tensor& cos, const at::Tensor& sin) {
  if (HasKernelsWithGradient(x_in)) return DifferentiableRotary(x_in, cos, sin);
  if (HasLayerKernels(x_in)) return DeviceRotary(x_in, cos, sin);
  const int64_t half = cos.size(1), rotated = 2 * half;
  if (!HasCpuKernels(x_in)) {
    const at::Tensor first = x_in.narrow(2, 0, half), second = x_in.narrow(2, half, half);
    const at::Tensor rest = x_in.narrow(2, rotated, x_in.size(2) - rotated);
    const at::Tensor c = cos.unsqueeze(1), s = sin.unsqueeze(1);
    return at::cat({first * c - second * s, second * c + first * s, rest}, 2)
        .to(x_in.scalar_type());
  }
  const at::Tensor x = HeadsPacked(x_in);
  at::Tensor y = EmptyOnCpu(x.sizes());
  const int64_t heads = x.size(1), head_dim = x.size(2);
  ParallelFor(x.size(0), heads * head_dim, [&](int64_t begin, int64_t end) {
    kernels::GetCpuKernels().rotary({Data(x) + begin * x.stride(0), x.stride(0),
                                     Data(cos) + begin * half, Data(sin) + begin * half,
                                     MutableData(y) + begin * heads * head_dim, heads * head_dim,
                                     head_dim, end - begin, heads, head_dim, rotated});
  });
  return y;
}

at::Tensor SplitPairs(const at::Tensor& x_in) {
  const int64_t heads = x_in.size(1), half = x_in.size(2) / 2;
  if (!UseCpuKernels(x_in)) return x_in.unflatten(2, {half, 2}).transpose(2, 3).flatten(2);
  const at::Tensor x = Packed(x_in);
  at::Tensor y = EmptyOnCpu({x.size(0), heads, 2 * half});
  for (int64_t row = 0; row < x.size(0); ++row) {
    for (int64_t head = 0; head < heads; ++head) {
      const float* const from = Data(x) + row * x.stride(0) + head * x.stride(1);
      float* const to = MutableData(y) + (row * heads + head) * 2 * half;
      for (int64_t d = 0; d < half; ++d) {
        to[d] = from[2 * d];
        to[half + d] = from[2 * d + 1];
      }
    }
  }
  return y;
}

at::Tensor JoinWidths(const at::Tensor& a_in, const at::Tensor& b_in) {
  if (!UseCpuKernels(a_in)) return at::cat({a_in, b_in}, 2);
  const at::Tensor a = Packed(a_in), b = Packed(b_in);
  const int64_t heads = a.size(1), width = a.size(2) + b.size(2);
  at::Tensor y = EmptyOnCpu({a.size(0), heads, width});
  ParallelFor(a.size(0), heads * width, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      for (int64_t head = 0; head < heads; ++head) {
        float* const to = MutableData(y) + (row * heads + head) * width;
        std::copy_n(Data(a) + row * a.stride(0) + head * a.stride(1), a.size(2), to);
        std::copy_n(Data(b) + row * b.stride(0) + head * b.stride(1), b.size(2), to + a.size(2));
      }
    }
  });
  return y;
}

at::Tensor Gated(const at::Tensor& gate_up_in, GateActivation activation) {
  if (HasKernelsWithGradient(gate_up_in)) return DifferentiableGated(gate_up_in, activation);
  if (HasLayerKernels(gate_up_in)) return DeviceGated(gate_up_in, activation);
  const int64_t width = gate_up_in.size(1) / 2;
  if (!HasCpuKernels(gate_up_in)) {
    const at::Tensor gate = gate_up_in.narrow(1, 0, width);
    return (activation == GateActivation::kSilu ? at::silu(gate) : at::gelu(gate, "tanh")) *
           gate_up_in.narrow(1, width, width);
  }
  const at::Tensor gate_up = Packed(gate_up_in);
  at::Tensor y = EmptyOnCpu({gate_up.size(0), width});
  const int64_t stride = gate_up.stride(0);
  ParallelFor(gate_up.size(0), 4 * width, [&](int64_t begin, int64_t end) {
    const float* gate = Data(gate_up) + begin * stride;
    kernels::GetCpuKernels().gated({gate, gate + width, stride, MutableData(y) + begin * width,
                                    width, end - begin, width, activation});
  });
  return y;
}

at::Tensor SoftCap(const at::Tensor& x, double soft_cap) {
  if (at::GradMode::is_enabled()) return DifferentiableSoftCap(x, soft_cap);
  if (!HasCpuKernels(x)) {
    const at::Tensor wide = x.to(at::toOpMathType(x.scalar_type()));  // x itself if it is wide
    return x.copy_(wide.div_(soft_cap).tanh_().mul_(soft_cap));
  }
  TORCH_CHECK(x.is_contiguous(), "x must be contiguous");
  constexpr int64_t kNumbers = 1024, kWorkPerNumber = 16;  // in multiply-adds
  const int64_t count = x.numel();
  ParallelFor((count + kNumbers - 1) / kNumbers, kNumbers * kWorkPerNumber,
              [&](int64_t begin, int64_t end) {
                const int64_t first = begin * kNumbers;
                kernels::GetCpuKernels().soft_cap({MutableData(x) + first,
                                                   std::min(end * kNumbers, count) - first,
                                                   static_cast<float>(soft_cap)});
              });
  return x;
}

at::Tensor CausalAttention(const at::Tensor& q_in, const at::Tensor& k_in, const at::Tensor& v_in,
                           const std::vector<int64_t>& offsets, const AttentionScores& scores,
                           const SequenceTables& tables) {
  const bool by_row = AttendsByRow(q_in, k_in, v_in, tables);
  // ATen's own attention with a gradient has no soft cap.
  const bool own_gradient = HasCpuKernels(q_in) || by_row || scores.soft_cap.has_value();
  if (at::GradMode::is_enabled() && own_gradient) {
    return DifferentiableAttention(q_in, k_in, v_in, offsets, scores, tables);
  }
  if (by_row) return DeviceCausalAttention(q_in, k_in, v_in, offsets, scores, tables);
  if (!HasCpuKernels(q_in)) {
    return AtenCausalAttention(q_in, k_in, v_in, offsets, scores, tables);
  }
  const at::Tensor q = HeadsPacked(q_in);
  if (tables.prefixes != nullptr) {
    const SharedPrefixes& prefixes = *tables.prefixes;
    return SharedAttentionKernel(q, KeyValueBlocks(k_in, v_in, prefixes), v_in.size(2), offsets,
                                 scores, prefixes);
  }
  const at::Tensor k = Packed(k_in), v = Packed(v_in);
  return AttentionKernel<float>(q, k.size(1), v.size(2), offsets, scores, [&](int64_t sequence) {
    return AttentionSource<float>{Data(k) + offsets[sequence] * k.stride(0),
                                  k.stride(0),
                                  k.stride(1),
                                  Data(v) + offsets[sequence] * v.stride(0),
                                  v.stride(0),
                                  v.stride(1),
                                  0};
  });
}

bool NeedsPagedRows(at::Device device, at::ScalarType type) { return !HasCpuKernels(device, type); }

at::Tensor CachedAttention(const at::Tensor& q_in, const at::Tensor& k_in, const at::Tensor& v_in,
                           const std::vector<int64_t>& offsets, const PagedSequences& sequences,
                           const at::Tensor& key_cache, const at::Tensor& value_cache,
                           const AttentionScores& scores) {
  TORCH_CHECK(!at::GradMode::is_enabled(), "cached attention has no gradient");
  if (HasDeviceAttention(q_in, key_cache, value_cache)) {
    return DeviceCachedAttention(q_in, k_in, v_in, offsets, sequences, key_cache, value_cache,
                                 scores);
  }
  if (NeedsPagedRows(q_in.device(), q_in.scalar_type())) {
    return AtenCachedAttention(q_in, k_in, v_in, offsets, sequences, key_cache, value_cache,
                               scores);
  }
  constexpr int64_t kTokens = kernels::kAttentionBlock;
  const at::ScalarType type = key_cache.scalar_type();
  TORCH_CHECK(key_cache.size(2) == kTokens && key_cache.stride(3) == 1 &&
                  value_cache.size(2) == kTokens && value_cache.stride(3) == 1,
              "a token of the cache must be contiguous, and a block hold ", kTokens, " tokens");
  TORCH_CHECK(key_cache.stride(0) == value_cache.stride(0),
              "blocks of keys and of values must be as far apart");
  TORCH_CHECK((type == at::kFloat || type == at::kBFloat16) && value_cache.scalar_type() == type,
              "keys and values must be float32 or bfloat16, both of one type");
  const at::Tensor q = HeadsPacked(q_in), k = Packed(k_in), v = Packed(v_in);
  if (type == at::kBFloat16) {
    return CachedAttentionKernel<uint16_t>(q, k, v, offsets, sequences, key_cache, value_cache,
                                           scores);
  }
  return CachedAttentionKernel<float>(q, k, v, offsets, sequences, key_cache, value_cache, scores);
}

}  // namespace tandem::ops
