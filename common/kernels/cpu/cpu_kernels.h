// fp32 kernels on the CPU: raw pointers, one thread; common/ops splits the work.
//
// They are batch-invariant: what a row or an element comes out as depends on its own operands only,
// never on how many others a call computes or how the caller splits them. The same source is
// compiled for several instruction sets and chosen once, at start; results differ between sets.
#ifndef TANDEM_COMMON_KERNELS_CPU_CPU_KERNELS_H_
#define TANDEM_COMMON_KERNELS_CPU_CPU_KERNELS_H_

#include <cstdint>

namespace tandem::kernels {

// y[r, o] (+)= sum_k x[r, k] w[o, k] + bias[o] for r in [0, rows), o in [out_begin, out_end).
struct LinearArgs {
  const float* x;
  int64_t x_stride;   // elements between rows
  const float* w;     // [out, in], contiguous
  const float* bias;  // [out] or nullptr
  float* y;
  int64_t y_stride;
  int64_t rows;
  int64_t in;
  int64_t out_begin;
  int64_t out_end;
  bool accumulate;  // adds to what y holds (a residual) instead of overwriting it
};

// Causal attention of the query heads that share one key/value head, for consecutive rows of one
// sequence. Row r is at position first_position + r and attends to the keys at 0 .. its own. Keys
// and values are never repeated; the softmax runs online over blocks of kAttentionBlock keys from
// position 0 on (https://arxiv.org/abs/2205.14135), so neither chunking nor batching shows.
struct AttentionArgs {
  const float* q;  // row r, head g at q + r * q_stride + g * head_dim
  int64_t q_stride;
  const float* k;  // position p at k + p * k_stride
  int64_t k_stride;
  const float* v;
  int64_t v_stride;
  float* out;  // as q
  int64_t out_stride;
  int64_t rows;
  int64_t group;  // query heads of this key/value head
  int64_t head_dim;
  int64_t first_position;
  float scale;
};
inline constexpr int64_t kAttentionBlock = 64;

// y = x / sqrt(mean(x^2) + eps) * w, row by row (https://arxiv.org/abs/1910.07467).
// y may be x.
struct RmsNormArgs {
  const float* x;
  int64_t x_stride;
  const float* w;  // [width]
  float* y;
  int64_t y_stride;
  int64_t rows;
  int64_t width;
  float eps;
};

// Gradients of the above by x and w: with r = 1 / sqrt(mean(x^2) + eps),
//   dx = r (w dy - x r^2 mean(x w dy)) and dw += sum over the rows of r x dy, row after row.
struct RmsNormBackwardArgs {
  const float* x;
  int64_t x_stride;
  const float* w;   // [width]
  const float* dy;  // as x
  int64_t dy_stride;
  float* dx;  // as x; may be dy
  int64_t dx_stride;
  float* dw;  // [width], added to
  int64_t rows;
  int64_t width;
  float eps;
};

// Rotates `heads` heads of `rows` rows: pairs (d, d + head_dim / 2), as Hugging Face orders them.
// Row r, head h: x + r * x_stride + h * head_dim to y + r * y_stride + h * y_head_stride.
// y may be x.
struct RotaryArgs {
  const float* x;
  int64_t x_stride;
  const float* cos;  // [rows, head_dim / 2]
  const float* sin;
  float* y;
  int64_t y_stride;
  int64_t y_head_stride;
  int64_t rows;
  int64_t heads;
  int64_t head_dim;
};

// y = gate * sigmoid(gate) * up.
struct SwiGluArgs {
  const float* gate;
  const float* up;
  int64_t in_stride;  // of gate and of up
  float* y;
  int64_t y_stride;
  int64_t rows;
  int64_t width;
};

// Gradients of the above: with s = sigmoid(gate),
//   d gate = dy up s (1 + gate (1 - s)) and d up = dy gate s.
struct SwiGluBackwardArgs {
  const float* gate;
  const float* up;
  int64_t in_stride;  // of gate and of up
  const float* dy;
  int64_t dy_stride;
  float* d_gate;
  float* d_up;
  int64_t out_stride;  // of d_gate and of d_up
  int64_t rows;
  int64_t width;
};

// Statistics of `rows` rows of a tile of logits, each times the row's scale: with z_j the scaled
// logits, max = max_j z_j, sum = sum_j exp(z_j - max) and weighted = sum_j exp(z_j - max)(z_j -
// max).
struct LogitStatisticsArgs {
  const float* logits;  // [rows, width]
  const float* scales;  // [rows], or nullptr for 1
  int64_t rows;
  int64_t width;
  float* max;  // [rows]
  float* sum;
  float* weighted;
};

// Overwrites logits with exp(z_j - max)(constant + slope (z_j - max)), row by row; in bf16 as the
// first `width` 16-bit numbers of a row.
struct LogitGradientArgs {
  float* logits;  // [rows, width]
  const float* scales;
  int64_t rows;
  int64_t width;
  const float* max;  // [rows], at least that of the row
  const float* constants;
  const float* slopes;
  bool bfloat16;
};

// The divergence (nats) of two tiles of whole rows of logits, each times the row's scale: with
// p = softmax(z scale) and q that of the junior's, KL(p || q), or KL(q || p) if `forward`. Its
// gradient by z, times gradient_scale, overwrites the logits if that is asked for; in bf16 as the
// first `width` 16-bit numbers of a row.
struct LogitDivergenceArgs {
  float* logits;               // [rows, width]
  const float* junior_logits;  // [rows, width]
  const float* scales;         // [rows], or nullptr for 1
  int64_t rows;
  int64_t width;
  bool forward;
  bool gradient;
  float gradient_scale;
  bool bfloat16;
  double* divergences;  // [rows]
};

struct CpuKernels {
  const char* isa;
  void (*linear)(const LinearArgs&);
  void (*attention)(const AttentionArgs&);
  void (*rms_norm)(const RmsNormArgs&);
  void (*rms_norm_backward)(const RmsNormBackwardArgs&);
  void (*rotary)(const RotaryArgs&);
  void (*swiglu)(const SwiGluArgs&);
  void (*swiglu_backward)(const SwiGluBackwardArgs&);
  void (*logit_statistics)(const LogitStatisticsArgs&);
  void (*logit_gradient)(const LogitGradientArgs&);
  void (*logit_divergence)(const LogitDivergenceArgs&);
};

// The best set this CPU runs.
const CpuKernels& GetCpuKernels();

// "portable", "avx2" or "avx512"; nullptr when the build or the CPU lacks it. For tests.
const CpuKernels* FindCpuKernels(const char* isa);

}  // namespace tandem::kernels

#endif  // TANDEM_COMMON_KERNELS_CPU_CPU_KERNELS_H_
