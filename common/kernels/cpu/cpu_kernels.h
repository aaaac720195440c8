// Kernels on the CPU: raw pointers, one thread; common/ops and common/loss divide the work among
// threads. docs/internals/kernels.md says which kernel runs where.
//
// The float32 kernels are batch-invariant: the bits of a row or an element depend on its own
// operands only, never on how many others a call computes or how the caller divides them. The same
// source is compiled for several instruction sets; results differ between sets, but for linear maps
// between those that have fused multiply-adds.
#ifndef TANDEM_COMMON_KERNELS_CPU_CPU_KERNELS_H_
#define TANDEM_COMMON_KERNELS_CPU_CPU_KERNELS_H_

#include <cstdint>

#include "common/kernels/attention_window.h"
#include "common/kernels/gate_activation.h"
#include "common/kernels/weight_format.h"

namespace tandem::kernels {

// y[r, o] (+)= sum_k x[r, k] w[o, k] + bias[o] for r in [0, rows), o in [out_begin, out_end). The
// sum is one chain of fused multiply-adds, on every instruction set that has them.
//
// `Number` is float, and k goes in ascending order; or uint16_t for bf16, and k goes through pairs
// in ascending order, the second of a pair first: 1, 0, 3, 2, and so on. That is what the
// instruction VDPBF16PS computes (Intel's manual; measured with random bits on an EPYC of family
// 26), and instruction sets without it do the same with two multiply-adds. As in that instruction
// numbers below 2^-126, given or computed, count as 0: in factors and sums, and in bias and y, too.
// Rows of bf16 begin at even distances, and a 0 follows an odd row of x; those of w are even.
template <typename Number>
struct LinearArgs {
  const Number* x;
  int64_t x_stride;   // elements between rows
  const Number* w;    // [out, in], contiguous
  const float* bias;  // [out] or nullptr
  float* y;
  int64_t y_stride;
  int64_t rows;
  int64_t in;
  int64_t out_begin;
  int64_t out_end;
  bool accumulate;  // adds to what y holds (a residual) instead of overwriting it
};

// y[r, o] = sum_k x[r, k] w[k, o]: a linear map whose matrix is stored input by input. The sum is
// one chain of fused multiply-adds over k in ascending order, as in LinearArgs.
struct TransposedLinearArgs {
  const float* x;
  int64_t x_stride;  // elements between rows
  const float* w;    // [in, out]
  int64_t w_stride;
  float* y;
  int64_t y_stride;
  int64_t rows;
  int64_t in;
  int64_t out;
};

// LinearArgs with a packed matrix (packed_weight.h), for the outputs of its panels [panel_begin,
// panel_end). The result has the bits of LinearArgs with the values of the packed weights.
template <typename Number>
struct PackedLinearArgs {
  const Number* x;
  int64_t x_stride;
  WeightFormat format;  // packed; kBfloat16 with x in bf16
  const void* w;        // PackedBytes(format, out, in), at a multiple of 64 bytes
  const float* bias;    // [out] or nullptr
  float* y;
  int64_t y_stride;
  int64_t rows;
  int64_t in;
  int64_t out;
  int64_t panel_begin;
  int64_t panel_end;
  bool accumulate;
};

// The values of the panels [panel_begin, panel_end) of a packed matrix (packed_weight.h), input by
// input: that of input k and output o is written to to[k * to_stride + o - kPanelOuts *
// panel_begin], padding rows included.
struct UnpackArgs {
  WeightFormat format;
  const void* w;
  int64_t in;
  int64_t panel_begin;
  int64_t panel_end;
  float* to;
  int64_t to_stride;
};

// Rounds rows to bf16: to the nearest, ties to even; NaN stays NaN. A 0 follows an odd row.
struct RoundedRowsArgs {
  const float* x;
  int64_t x_stride;  // elements between rows
  uint16_t* y;
  int64_t y_stride;  // even
  int64_t rows;
  int64_t width;
};

// Causal attention of the query heads that share one key/value head, for consecutive rows of one
// sequence. Row r is at position first_position + r and attends to the keys at positions 0 to its
// own, or to those of its window. Keys and values are never repeated; the softmax runs online over
// blocks of kAttentionBlock keys, which begin at multiples of that
// (https://arxiv.org/abs/2205.14135), so bits depend neither on chunking nor on batching. Blocks
// before the window of the first row are not read.
//
// `Number` is the type of keys and values: float, or uint16_t for bf16, which is widened as it is
// loaded. Sums are float32, and the result has the bits of float32 keys and values of equal value.
// Values may be narrower than queries and keys, and may be columns of the keys.
template <typename Number>
struct AttentionArgs {
  const float* q;  // row r, head g is at q + r * q_stride + g * head_dim
  int64_t q_stride;
  const Number* k;  // position p is at k + p * k_stride, or in a block: see `blocks`
  int64_t k_stride;
  const Number* v;
  int64_t v_stride;
  float* out;  // row r, head g is at out + r * out_stride + g * value_dim
  int64_t out_stride;
  int64_t rows;
  int64_t group;      // query heads of this key/value head
  int64_t head_dim;   // width of queries and keys
  int64_t value_dim;  // width of values
  int64_t first_position;
  float scale;
  // If set, keys and values lie in blocks of kAttentionBlock positions: those of position p in
  // block b = blocks[p / kAttentionBlock], with the key at
  // k + b * block_stride + (p % kAttentionBlock) * k_stride. The bits are the same.
  const int32_t* blocks = nullptr;
  int64_t block_stride = 0;
  int64_t window = kNoWindow;
  float soft_cap = 0;  // of the scaled scores, as in SoftCapArgs; 0: none
};
inline constexpr int64_t kAttentionBlock = 64;

// y = x / sqrt(mean(x^2) + eps) * (w + w_offset), row by row (https://arxiv.org/abs/1910.07467).
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
  float w_offset = 0;
};

// Gradients of RmsNormArgs by x and w: with r = 1 / sqrt(mean(x^2) + eps) and v = w + w_offset,
//   dx = r (v dy - x r^2 mean(x v dy)) and dw += r x dy, row after row.
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
  float w_offset = 0;
};

// Rotary embedding: rotates the pairs (d, d + rotary_dim / 2) of the first rotary_dim columns of
// every head, as Hugging Face orders them, and copies the others. Row r, head h is read at x + r *
// x_stride + h * head_dim and written at y + r * y_stride + h * y_head_stride. y may be x.
struct RotaryArgs {
  const float* x;
  int64_t x_stride;
  const float* cos;  // [rows, rotary_dim / 2]
  const float* sin;
  float* y;
  int64_t y_stride;
  int64_t y_head_stride;
  int64_t rows;
  int64_t heads;
  int64_t head_dim;
  int64_t rotary_dim;
};

// y = activation(gate) * up.
struct GatedArgs {
  const float* gate;
  const float* up;
  int64_t in_stride;  // between rows of gate, and of up
  float* y;
  int64_t y_stride;
  int64_t rows;
  int64_t width;
  GateActivation activation = GateActivation::kSilu;
};

// Gradients of GatedArgs: with activation(g) = g s, s = sigmoid(u(g)),
//   d gate = dy up s (1 + gate (1 - s) u') and d up = dy gate s.
struct GatedBackwardArgs {
  const float* gate;
  const float* up;
  int64_t in_stride;  // between rows of gate, and of up
  const float* dy;
  int64_t dy_stride;
  float* d_gate;
  float* d_up;
  int64_t out_stride;  // between rows of d_gate, and of d_up
  int64_t rows;
  int64_t width;
  GateActivation activation = GateActivation::kSilu;
};

// x_j = soft_cap tanh(x_j / soft_cap), in place.
struct SoftCapArgs {
  float* x;
  int64_t count;
  float soft_cap;
};

// Statistics of the rows of a tile of logits. With z_j the logits of a row times its scale:
//   max = max_j z_j, sum = sum_j exp(z_j - max), weighted = sum_j exp(z_j - max) (z_j - max).
struct LogitStatisticsArgs {
  const float* logits;  // [rows, width]
  const float* scales;  // [rows], or nullptr for 1
  int64_t rows;
  int64_t width;
  float* max;  // [rows]
  float* sum;
  float* weighted;
};

// Overwrites each row of logits with exp(z_j - max) (constant + slope (z_j - max)), times
// 1 - (logit_j / soft_cap)^2 if the logits are those after a soft cap; in bf16 as the first `width`
// 16-bit numbers of the row.
struct LogitGradientArgs {
  float* logits;  // [rows, width]
  const float* scales;
  int64_t rows;
  int64_t width;
  const float* max;  // [rows], at least the maximum of the row
  const float* constants;
  const float* slopes;
  bool bfloat16;
  float soft_cap = 0;  // 0: none
};

// Statistics of `rows` rows of logits of two models, from which their divergence follows. With the
// scaled logits z_j and z'_j (the teacher's), d_j = z_j - max and d'_j = z'_j - teacher_max:
//   sum = sum_j exp(d_j), teacher_sum = sum_j exp(d'_j) and
//   moment = sum_j exp(d_j)(d_j - d'_j), or sum_j exp(d'_j)(d'_j - d_j) if `forward`.
struct DivergenceStatisticsArgs {
  const float* logits;          // [rows, width]
  const float* teacher_logits;  // [rows, width]
  const float* scales;          // [rows], or nullptr for 1
  int64_t rows;
  int64_t width;
  bool forward;
  double* max;  // [rows]
  double* teacher_max;
  double* sum;
  double* teacher_sum;
  double* moment;
};

// Overwrites logits with factor exp(d_j)(d_j - d'_j - offset), or with
// factor (exp(d_j) - exp(d'_j) offset) if `forward`, row by row, times 1 - (logit_j / soft_cap)^2
// if the logits are those after a soft cap; in bf16 as the first `width` 16-bit numbers of a row.
struct DivergenceGradientArgs {
  float* logits;                // [rows, width]
  const float* teacher_logits;  // [rows, width]
  const float* scales;
  int64_t rows;
  int64_t width;
  bool forward;
  const float* max;  // [rows], at least that of the row
  const float* teacher_max;
  const float* factors;
  const float* offsets;
  bool bfloat16;
  float soft_cap = 0;  // of `logits`; 0: none
};

// A matrix product: product[i, j] (+)= sum_l a[i, l] b[l, j] for i < m, j < n, l < k, summed in
// float32. `Number` is float, or uint16_t for bf16, of which numbers below 2^-126 count as 0.
//
// The bits of an entry depend on its row of a, its column of b and k alone.
template <typename Number>
struct ProductArgs {
  const Number* a;  // a[i, l] is at a + i * a_row_stride + l * a_column_stride
  int64_t a_row_stride, a_column_stride;  // in elements; one of the two is 1
  const Number* b;                        // as a
  int64_t b_row_stride, b_column_stride;
  float* product;          // rows are contiguous
  int64_t product_stride;  // elements between rows
  int64_t m, n, k;
  bool accumulate;  // adds to what `product` holds instead of overwriting it
};

// The product of factors of one type: by a kernel of this library, or by libtorch.
template <typename Number>
struct ProductKernel {
  const char* name = "libtorch";
  // Throws std::bad_alloc when there is no memory to pack the factors in. nullptr: libtorch
  // multiplies, with MKL where it has it.
  void (*multiply)(const ProductArgs<Number>&) = nullptr;
  // libtorch also multiplies where m, n or k is smaller: packing would take longer than that.
  int64_t min_size = 0;
  // Whether a product is computed again faster than its result is kept in main memory: the loss
  // then recomputes logits (LossMode::kAuto in common/loss/logits/fused_output_loss.h).
  bool prefers_recompute = false;
};

// The table of kernels. ATen computes where an entry is nullptr.
struct CpuKernels {
  const char* name;  // "portable", "avx2" or "avx512", the instruction set; or "aten"
  void (*linear)(const LinearArgs<float>&) = nullptr;
  void (*packed_linear)(const PackedLinearArgs<float>&) = nullptr;
  void (*bfloat16_linear)(const LinearArgs<uint16_t>&) = nullptr;
  void (*bfloat16_packed_linear)(const PackedLinearArgs<uint16_t>&) = nullptr;
  void (*rounded_rows)(const RoundedRowsArgs&) = nullptr;
  void (*unpack)(const UnpackArgs&) = nullptr;
  void (*transposed_linear)(const TransposedLinearArgs&) = nullptr;
  void (*attention)(const AttentionArgs<float>&) = nullptr;
  void (*bfloat16_attention)(const AttentionArgs<uint16_t>&) = nullptr;
  void (*rms_norm)(const RmsNormArgs&) = nullptr;
  void (*rms_norm_backward)(const RmsNormBackwardArgs&) = nullptr;
  void (*rotary)(const RotaryArgs&) = nullptr;
  void (*gated)(const GatedArgs&) = nullptr;
  void (*gated_backward)(const GatedBackwardArgs&) = nullptr;
  void (*soft_cap)(const SoftCapArgs&) = nullptr;
  void (*logit_statistics)(const LogitStatisticsArgs&) = nullptr;
  void (*logit_gradient)(const LogitGradientArgs&) = nullptr;
  void (*divergence_statistics)(const DivergenceStatisticsArgs&) = nullptr;
  void (*divergence_gradient)(const DivergenceGradientArgs&) = nullptr;
  ProductKernel<float> float_product = {};
  ProductKernel<uint16_t> bfloat16_product = {};
};

// The properties of a CPU that kernels are chosen by.
struct CpuFeatures {
  bool avx2 = false;         // with FMA
  bool avx512 = false;       // F, DQ, VL and BW
  bool avx512_bf16 = false;  // products of pairs of bf16
  bool amx = false;          // tile registers with bf16, granted by the operating system
  bool intel = false;        // MKL has kernels for AVX-512 on Intel's CPUs alone

  bool operator==(const CpuFeatures&) const = default;
};

// Returns the features of this CPU. Asks the operating system for the tile registers.
CpuFeatures DetectCpuFeatures();

// Returns the fastest kernels for a CPU. They are chosen by features, never by timing: two starts
// on one machine give the same bits.
CpuKernels ChooseCpuKernels(const CpuFeatures& cpu);

// The table for `compute.kernels: aten`: no own kernels.
extern const CpuKernels kAtenKernels;

// Returns the table in use: the fastest for this CPU, unless UseCpuKernels has set another.
const CpuKernels& GetCpuKernels();

// Sets the table that the process uses, which must stay alive; nullptr: the fastest for this CPU.
// For start-up, and for tests between operations (a backward pass needs the table of its forward
// pass).
void UseCpuKernels(const CpuKernels* kernels);

}  // namespace tandem::kernels

#endif  // TANDEM_COMMON_KERNELS_CPU_CPU_KERNELS_H_
