// The float32 kernels of cpu_kernels.h on vectors of TANDEM_SIMD_WIDTH floats. Included by one
// source file per instruction set. Everything is in an unnamed namespace and nothing of the
// standard library is instantiated: an inline function compiled for AVX-512 must not end up in code
// that runs elsewhere.
#ifdef __AVX512F__
#include <immintrin.h>
#endif

#include <cstdint>
#include <utility>  // integer_sequence: types only, no code

#include "common/kernels/cpu/instruction_sets.h"
#include "common/kernels/cpu/unroll.h"

#ifndef TANDEM_SIMD_WIDTH
#error "define TANDEM_SIMD_WIDTH (4, 8 or 16) and TANDEM_SIMD_ROWS before including this file"
#endif

#define TANDEM_INLINE inline __attribute__((always_inline))
#define TANDEM_INLINE_LAMBDA __attribute__((always_inline))

// NOLINTBEGIN(misc-definitions-in-headers): text for one source file per instruction set.
namespace tandem::kernels {
namespace {

constexpr int kWidth = TANDEM_SIMD_WIDTH;
constexpr int kRows = TANDEM_SIMD_ROWS;  // rows of a register tile
constexpr int kOuts = 4;                 // columns of a register tile
constexpr int kBlock = static_cast<int>(kAttentionBlock);

typedef float Vec __attribute__((vector_size(kWidth * 4), aligned(4), may_alias));
typedef int32_t IVec __attribute__((vector_size(kWidth * 4), aligned(4), may_alias));
typedef int16_t ShortVec __attribute__((vector_size(kWidth * 2), aligned(2), may_alias));
typedef uint32_t UIntVec __attribute__((vector_size(kWidth * 4), aligned(4), may_alias));
typedef uint16_t UShortVec __attribute__((vector_size(kWidth * 2), aligned(2), may_alias));
typedef float Vec4 __attribute__((vector_size(16), aligned(4), may_alias));

TANDEM_INLINE Vec Load(const float* p) { return *reinterpret_cast<const Vec*>(p); }
// Widens unsigned integers of 16 bits.
TANDEM_INLINE UIntVec LoadWidened(const uint16_t* p) {
#if TANDEM_SIMD_WIDTH == 16 && defined(__AVX512F__)
  // GCC 12 makes two halves and joins them of __builtin_convertvector, and warns of the form
  // without a mask.
  return reinterpret_cast<UIntVec>(
      _mm512_maskz_cvtepu16_epi32(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
#else
  return __builtin_convertvector(*reinterpret_cast<const UShortVec*>(p), UIntVec);
#endif
}
// Widens bf16, whose bits are the upper half of a float's.
TANDEM_INLINE Vec Load(const uint16_t* p) {
  const UIntVec bits = LoadWidened(p) << 16;
  return reinterpret_cast<const Vec&>(bits);
}
TANDEM_INLINE float Load1(const float* p) { return *p; }
TANDEM_INLINE float Load1(const uint16_t* p) {
  const uint32_t bits = uint32_t{*p} << 16;
  float value;
  __builtin_memcpy(&value, &bits, sizeof(value));
  return value;
}
TANDEM_INLINE void Store(float* p, Vec v) { *reinterpret_cast<Vec*>(p) = v; }
TANDEM_INLINE Vec Splat(float x) { return Vec{} + x; }

// Source of lane i in the four shuffles that Sum4 adds up: indices from kWidth on are lanes of the
// second vector.
constexpr int EvenLane(int i) { return (i & ~1) + ((i & 1) ? kWidth : 0); }
constexpr int OddLane(int i) { return (i | 1) + ((i & 1) ? kWidth : 0); }
constexpr int LowLane(int i) { return (i & ~3) + (i & 1) + ((i & 2) ? kWidth : 0); }
constexpr int HighLane(int i) { return LowLane(i) + 2; }

// Returns the sums of four vectors, each added up by the same tree.
template <int... I>
TANDEM_INLINE Vec4 Sum4Lanes(Vec a, Vec b, Vec c, Vec d, std::integer_sequence<int, I...>) {
  const Vec ab =
      __builtin_shufflevector(a, b, EvenLane(I)...) + __builtin_shufflevector(a, b, OddLane(I)...);
  const Vec cd =
      __builtin_shufflevector(c, d, EvenLane(I)...) + __builtin_shufflevector(c, d, OddLane(I)...);
  const Vec sums = __builtin_shufflevector(ab, cd, LowLane(I)...) +
                   __builtin_shufflevector(ab, cd, HighLane(I)...);
  Vec4 total = *reinterpret_cast<const Vec4*>(&sums);
  for (int i = 1; i < kWidth / 4; ++i) total += reinterpret_cast<const Vec4*>(&sums)[i];
  return total;
}

TANDEM_INLINE Vec4 Sum4(Vec a, Vec b, Vec c, Vec d) {
  return Sum4Lanes(a, b, c, d, std::make_integer_sequence<int, kWidth>());
}

TANDEM_INLINE float Sum(Vec a) { return Sum4(a, a, a, a)[0]; }

TANDEM_INLINE float Max(float a, float b) { return a > b ? a : b; }

// e^x to about 1 ulp: x = n ln 2 + r, a polynomial in r (the coefficients of Cephes' expf), 2^n by
// its bits. 0 below -87.3; x is at most 88.
TANDEM_INLINE Vec Exp(Vec x) {
  const Vec magic = Splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const Vec shifted = x * 1.44269504088896341f + magic;
  const Vec n = shifted - magic;
  const Vec r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  Vec p = Splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  const IVec exponent = (reinterpret_cast<const IVec&>(shifted) + (127 - 0x4b400000)) << 23;
  const Vec result = p * reinterpret_cast<const Vec&>(exponent);
  return x < Splat(-87.3f) ? Vec{} : result;
}

TANDEM_INLINE float Exp1(float x) { return Exp(Splat(x))[0]; }

// tanh(x) to about 2 ulp: a polynomial for small x (the coefficients of Cephes' tanhf), else from
// e^2|x|.
TANDEM_INLINE Vec Tanh(Vec x) {
  const Vec square = x * x;
  Vec p = Splat(-5.70498872745e-3f);
  p = p * square + 2.06390887954e-2f;
  p = p * square - 5.37397155531e-2f;
  p = p * square + 1.33314422036e-1f;
  p = p * square - 3.33332819422e-1f;
  const Vec small = p * square * x + x;
  const Vec magnitude = x < Vec{} ? -x : x;
  const Vec bounded = magnitude > Splat(10.0f) ? Splat(10.0f) : magnitude;  // tanh is 1 there
  const Vec large = 1.0f - 2.0f / (Exp(bounded + bounded) + 1.0f);
  return magnitude < Splat(0.625f) ? small : (x < Vec{} ? -large : large);
}

TANDEM_INLINE Vec SoftCapped(Vec x, float cap) { return Tanh(x / cap) * cap; }

// Returns the derivative of SoftCapped, given its result.
TANDEM_INLINE Vec SoftCapSlope(Vec capped, float cap) {
  const Vec t = capped / cap;
  return 1.0f - t * t;
}

// totals[r][o] = sum_k x[r][k] w[o * w_stride + k]. Each sum is a vector accumulator, then the tree
// of Sum4, then the tail: the same steps in every shape of tile.
template <int R, int O, typename Number>
TANDEM_INLINE void DotTile(const float* const* x, const Number* w, int64_t w_stride, int64_t n,
                           Vec4* totals) {
  Vec sums[R][O];
  TANDEM_UNROLL for (int r = 0; r < R; ++r) {
    TANDEM_UNROLL for (int o = 0; o < O; ++o) sums[r][o] = Vec{};
  }
  const Number* row[O];
  TANDEM_UNROLL for (int o = 0; o < O; ++o) row[o] = w + o * w_stride;
  int64_t k = 0;
  for (; k + kWidth <= n; k += kWidth) {
    Vec wk[O];
    TANDEM_UNROLL for (int o = 0; o < O; ++o) wk[o] = Load(row[o] + k);
    TANDEM_UNROLL for (int r = 0; r < R; ++r) {
      const Vec xk = Load(x[r] + k);
      TANDEM_UNROLL for (int o = 0; o < O; ++o) sums[r][o] += xk * wk[o];
    }
  }
  TANDEM_UNROLL for (int r = 0; r < R; ++r) {
    totals[r] = Sum4(sums[r][0], sums[r][1 % O], sums[r][2 % O], sums[r][3 % O]);
  }
  for (; k < n; ++k) {
    for (int r = 0; r < R; ++r) {
      for (int o = 0; o < O; ++o) {
        totals[r][o] = __builtin_fmaf(x[r][k], Load1(w + o * w_stride + k), totals[r][o]);
      }
    }
  }
}

// Calls sink(o, outs, totals) for tiles of the columns [0, count): totals[r][i], i < outs, is
// sum_k x[r][k] w[(o + i) * w_stride + k], for r < rows <= kRows.
template <int R = kRows, typename Number, typename Sink>
TANDEM_INLINE void DotTiles(int64_t rows, const float* const* x, const Number* w, int64_t w_stride,
                            int64_t count, int64_t n, const Sink& sink) {
  if constexpr (R > 0) {
    if (rows < R) return DotTiles<R - 1>(rows, x, w, w_stride, count, n, sink);
    Vec4 totals[R];
    int64_t o = 0;
    for (; o + kOuts <= count; o += kOuts) {
      DotTile<R, kOuts>(x, w + o * w_stride, w_stride, n, totals);
      sink(o, kOuts, totals);
    }
    for (; o < count; ++o) {
      DotTile<R, 1>(x, w + o * w_stride, w_stride, n, totals);
      sink(o, 1, totals);
    }
  }
}

TANDEM_INLINE int64_t Min(int64_t a, int64_t b) { return a < b ? a : b; }
TANDEM_INLINE int64_t Max(int64_t a, int64_t b) { return a > b ? a : b; }

// Online-softmax state of up to kRows (row, head) pairs; the accumulators are the output rows.
struct Queries {
  int64_t count;
  const float* q[kRows];
  float* out[kRows];
  int64_t first_key[kRows];
  int64_t num_keys[kRows];  // from position 0
  float max[kRows];
  float sum[kRows];
};

// The keys of a block that each query has: those from `first` to `end`, which both ascend.
struct KeyRange {
  int64_t first[kRows];
  int64_t end[kRows];
};

// AccumulateValues for R queries and D vectors of the head from dimension `d` on.
template <int R, int D, typename Number>
TANDEM_INLINE void AccumulateTile(const Queries& queries, const float (*p)[kBlock],
                                  const float* decay, const Number* v, int64_t v_stride,
                                  const KeyRange& keys, int64_t d) {
  Vec acc[R][D];
  TANDEM_UNROLL for (int i = 0; i < R; ++i) {
    TANDEM_UNROLL for (int c = 0; c < D; ++c) {
      acc[i][c] = Load(queries.out[i] + d + c * kWidth) * decay[i];
    }
  }
  const auto add = [&](int i, int64_t begin, int64_t end) TANDEM_INLINE_LAMBDA {
    for (int64_t j = begin; j < end; ++j) {
      TANDEM_UNROLL for (int c = 0; c < D; ++c) {
        acc[i][c] += Load(v + j * v_stride + d + c * kWidth) * p[i][j];
      }
    }
  };
  // Every query has the keys from `begin` to `end`; the others lie at the edge of a window, or at
  // the diagonal.
  const int64_t begin = keys.first[R - 1], end = Max(begin, keys.end[0]);
  TANDEM_UNROLL for (int i = 0; i + 1 < R; ++i) { add(i, keys.first[i], Min(begin, keys.end[i])); }
  for (int64_t j = begin; j < end; ++j) {
    Vec value[D];
    TANDEM_UNROLL for (int c = 0; c < D; ++c) value[c] = Load(v + j * v_stride + d + c * kWidth);
    TANDEM_UNROLL for (int i = 0; i < R; ++i) {
      TANDEM_UNROLL for (int c = 0; c < D; ++c) acc[i][c] += value[c] * p[i][j];
    }
  }
  TANDEM_UNROLL for (int i = 1; i < R; ++i) add(i, end, keys.end[i]);
  TANDEM_UNROLL for (int i = 0; i < R; ++i) {
    TANDEM_UNROLL for (int c = 0; c < D; ++c) Store(queries.out[i] + d + c * kWidth, acc[i][c]);
  }
}

// out[i] = out[i] * decay[i] + sum_j p[i][j] v[j], over the keys of query i. Other keys are not
// read: a value of infinity times a weight of 0 would be NaN.
template <int R = kRows, typename Number>
TANDEM_INLINE void AccumulateValues(const Queries& queries, const float (*p)[kBlock],
                                    const float* decay, const Number* v, int64_t v_stride,
                                    const KeyRange& keys, int64_t value_dim) {
  if constexpr (R > 0) {
    if (queries.count < R) {
      return AccumulateValues<R - 1>(queries, p, decay, v, v_stride, keys, value_dim);
    }
    // A sum is a chain over the keys: several of them are in flight.
    constexpr int kVectors = 4;
    int64_t d = 0;
    for (; d + kVectors * kWidth <= value_dim; d += kVectors * kWidth) {
      AccumulateTile<R, kVectors>(queries, p, decay, v, v_stride, keys, d);
    }
    for (; d + kWidth <= value_dim; d += kWidth) {
      AccumulateTile<R, 1>(queries, p, decay, v, v_stride, keys, d);
    }
    for (; d < value_dim; ++d) {
      for (int i = 0; i < R; ++i) {
        float acc = queries.out[i][d] * decay[i];
        for (int64_t j = keys.first[i]; j < keys.end[i]; ++j) {
          acc = __builtin_fmaf(Load1(v + j * v_stride + d), p[i][j], acc);
        }
        queries.out[i][d] = acc;
      }
    }
  }
}

template <typename Number>
TANDEM_INLINE void AttendBlock(const AttentionArgs<Number>& a, Queries& queries, int64_t begin,
                               int64_t keys) {
  alignas(64) float p[kRows][kBlock];
  // `begin` is a multiple of kBlock.
  const auto offset = [&](int64_t stride) {
    return a.blocks == nullptr ? begin * stride : a.blocks[begin / kBlock] * a.block_stride;
  };
  const Number* k_block = a.k + offset(a.k_stride);
  DotTiles(queries.count, queries.q, k_block, a.k_stride, keys, a.head_dim,
           [&](int64_t j, int outs, const Vec4* totals) TANDEM_INLINE_LAMBDA {
             for (int64_t i = 0; i < queries.count; ++i) {
               for (int o = 0; o < outs; ++o) p[i][j + o] = totals[i][o] * a.scale;
             }
           });
  float decay[kRows];
  KeyRange range;
  for (int64_t i = 0; i < queries.count; ++i) {
    if (a.soft_cap > 0) {
      for (int64_t j = keys; j < kBlock; ++j) p[i][j] = 0;
      for (int64_t j = 0; j < kBlock; j += kWidth) {
        Store(p[i] + j, SoftCapped(Load(p[i] + j), a.soft_cap));
      }
    }
    range.end[i] = Max(0, Min(keys, queries.num_keys[i] - begin));
    range.first[i] = Max(0, Min(range.end[i], queries.first_key[i] - begin));
    for (int64_t j = 0; j < range.first[i]; ++j) p[i][j] = -__builtin_inff();
    for (int64_t j = range.end[i]; j < kBlock; ++j) p[i][j] = -__builtin_inff();
    Vec largest = Splat(queries.max[i]);
    for (int64_t j = 0; j < kBlock; j += kWidth) {
      const Vec score = Load(p[i] + j);
      largest = largest > score ? largest : score;
    }
    float highest = largest[0];
    for (int lane = 1; lane < kWidth; ++lane) highest = Max(highest, largest[lane]);
    if (highest == -__builtin_inff()) {
      // The block lies before this row's window, though in that of an earlier row. The row stays
      // as it would without the block: 0.
      for (int64_t j = 0; j < kBlock; ++j) p[i][j] = 0;
      decay[i] = 0;
      continue;
    }
    Vec sums = {};
    for (int64_t j = 0; j < kBlock; j += kWidth) {
      const Vec e = Exp(Load(p[i] + j) - highest);
      Store(p[i] + j, e);
      sums += e;
    }
    decay[i] = Exp1(queries.max[i] - highest);
    queries.sum[i] = __builtin_fmaf(queries.sum[i], decay[i], Sum(sums));
    queries.max[i] = highest;
  }
  AccumulateValues(queries, p, decay, a.v + offset(a.v_stride), a.v_stride, range, a.value_dim);
}

template <typename Number>
void Attention(const AttentionArgs<Number>& a) {
  const int64_t total = a.rows * a.group;
  for (int64_t first = 0; first < total; first += kRows) {
    Queries queries;
    queries.count = Min(kRows, total - first);
    for (int64_t i = 0; i < queries.count; ++i) {
      const int64_t row = (first + i) / a.group;
      const int64_t head = (first + i) % a.group;
      queries.q[i] = a.q + row * a.q_stride + head * a.head_dim;
      queries.out[i] = a.out + row * a.out_stride + head * a.value_dim;
      queries.first_key[i] = FirstKey(a.first_position + row, a.window);
      queries.num_keys[i] = a.first_position + row + 1;
      queries.max[i] = -__builtin_inff();
      queries.sum[i] = 0;
      for (int64_t d = 0; d < a.value_dim; ++d) queries.out[i][d] = 0;
    }
    // The first row begins first, and the last one ends last.
    const int64_t num_keys = queries.num_keys[queries.count - 1];
    for (int64_t begin = queries.first_key[0] / kBlock * kBlock; begin < num_keys;
         begin += kBlock) {
      AttendBlock(a, queries, begin, Min(kBlock, num_keys - begin));
    }
    for (int64_t i = 0; i < queries.count; ++i) {
      for (int64_t d = 0; d < a.value_dim; ++d) queries.out[i][d] /= queries.sum[i];
    }
  }
}

// TransposedLinear for R rows from x on, and D vectors of outputs from `out` on.
template <int R, int D>
TANDEM_INLINE void TransposedTile(const TransposedLinearArgs& a, int64_t row, int64_t out) {
  const float* x = a.x + row * a.x_stride;
  const float* w = a.w + out;
  Vec sums[R][D];
  TANDEM_UNROLL for (int r = 0; r < R; ++r) {
    TANDEM_UNROLL for (int c = 0; c < D; ++c) sums[r][c] = Vec{};
  }
  for (int64_t k = 0; k < a.in; ++k) {
    Vec wk[D];
    TANDEM_UNROLL for (int c = 0; c < D; ++c) wk[c] = Load(w + k * a.w_stride + c * kWidth);
    TANDEM_UNROLL for (int r = 0; r < R; ++r) {
      TANDEM_UNROLL for (int c = 0; c < D; ++c) sums[r][c] += wk[c] * x[r * a.x_stride + k];
    }
  }
  TANDEM_UNROLL for (int r = 0; r < R; ++r) {
    TANDEM_UNROLL for (int c = 0; c < D; ++c) {
      Store(a.y + (row + r) * a.y_stride + out + c * kWidth, sums[r][c]);
    }
  }
}

template <int R = kRows>
TANDEM_INLINE void TransposedRows(const TransposedLinearArgs& a, int64_t row, int64_t rows) {
  if constexpr (R > 0) {
    if (rows < R) return TransposedRows<R - 1>(a, row, rows);
    // A sum is a chain over the inputs: several of them are in flight.
    constexpr int kVectors = 4;
    int64_t out = 0;
    for (; out + kVectors * kWidth <= a.out; out += kVectors * kWidth) {
      TransposedTile<R, kVectors>(a, row, out);
    }
    for (; out + kWidth <= a.out; out += kWidth) TransposedTile<R, 1>(a, row, out);
    for (; out < a.out; ++out) {
      for (int64_t r = row; r < row + R; ++r) {
        float sum = 0;
        for (int64_t k = 0; k < a.in; ++k) {
          sum = __builtin_fmaf(a.x[r * a.x_stride + k], a.w[k * a.w_stride + out], sum);
        }
        a.y[r * a.y_stride + out] = sum;
      }
    }
  }
}

void TransposedLinear(const TransposedLinearArgs& a) {
  for (int64_t row = 0; row < a.rows; row += kRows) {
    TransposedRows(a, row, Min(kRows, a.rows - row));
  }
}

void RmsNorm(const RmsNormArgs& a) {
  for (int64_t row = 0; row < a.rows; ++row) {
    const float* x = a.x + row * a.x_stride;
    float* y = a.y + row * a.y_stride;
    Vec squares = {};
    int64_t k = 0;
    for (; k + kWidth <= a.width; k += kWidth) squares += Load(x + k) * Load(x + k);
    float sum = Sum(squares);
    for (; k < a.width; ++k) sum = __builtin_fmaf(x[k], x[k], sum);
    const float factor = 1.0f / __builtin_sqrtf(sum / static_cast<float>(a.width) + a.eps);
    for (k = 0; k + kWidth <= a.width; k += kWidth) {
      Store(y + k, Load(x + k) * factor * (Load(a.w + k) + a.w_offset));
    }
    for (; k < a.width; ++k) y[k] = x[k] * factor * (a.w[k] + a.w_offset);
  }
}

void RmsNormBackward(const RmsNormBackwardArgs& a) {
  const auto width = static_cast<float>(a.width);
  for (int64_t row = 0; row < a.rows; ++row) {
    const float* x = a.x + row * a.x_stride;
    const float* dy = a.dy + row * a.dy_stride;
    float* dx = a.dx + row * a.dx_stride;
    Vec squares = {}, products = {};
    int64_t k = 0;
    for (; k + kWidth <= a.width; k += kWidth) {
      squares += Load(x + k) * Load(x + k);
      products += Load(x + k) * ((Load(a.w + k) + a.w_offset) * Load(dy + k));
    }
    float square = Sum(squares), product = Sum(products);
    for (; k < a.width; ++k) {
      square = __builtin_fmaf(x[k], x[k], square);
      product = __builtin_fmaf(x[k], (a.w[k] + a.w_offset) * dy[k], product);
    }
    const float factor = 1.0f / __builtin_sqrtf(square / width + a.eps);
    const float along_x = factor * factor * factor * product / width;
    for (k = 0; k + kWidth <= a.width; k += kWidth) {
      const Vec xk = Load(x + k), dyk = Load(dy + k);
      Store(a.dw + k, Load(a.dw + k) + xk * factor * dyk);
      Store(dx + k, (Load(a.w + k) + a.w_offset) * dyk * factor - xk * along_x);
    }
    for (; k < a.width; ++k) {
      const float dyk = dy[k];
      a.dw[k] += x[k] * factor * dyk;
      dx[k] = (a.w[k] + a.w_offset) * dyk * factor - x[k] * along_x;
    }
  }
}

void Rotary(const RotaryArgs& a) {
  const int64_t half = a.rotary_dim / 2;
  for (int64_t row = 0; row < a.rows; ++row) {
    const float* cos = a.cos + row * half;
    const float* sin = a.sin + row * half;
    for (int64_t head = 0; head < a.heads; ++head) {
      const float* x = a.x + row * a.x_stride + head * a.head_dim;
      float* y = a.y + row * a.y_stride + head * a.y_head_stride;
      for (int64_t d = 0; d < half; ++d) {
        const float first = x[d], second = x[d + half];
        y[d] = __builtin_fmaf(first, cos[d], -(second * sin[d]));
        y[d + half] = __builtin_fmaf(second, cos[d], first * sin[d]);
      }
      for (int64_t d = a.rotary_dim; d < a.head_dim; ++d) y[d] = x[d];
    }
  }
}

// e^-x, at most e^88.
TANDEM_INLINE Vec ExpMinus(Vec x) {
  const Vec negated = -x;
  return Exp(negated > Splat(88.0f) ? Splat(88.0f) : negated);
}

// LoadSome and StoreSome move the first `count` <= kWidth lanes; LoadSome sets the others to 0.
TANDEM_INLINE Vec LoadSome(const float* p, int64_t count) {
  if (count == kWidth) return Load(p);
  Vec v = {};
  for (int64_t i = 0; i < count; ++i) v[i] = p[i];
  return v;
}
TANDEM_INLINE void StoreSome(float* p, Vec v, int64_t count) {
  if (count == kWidth) return Store(p, v);
  for (int64_t i = 0; i < count; ++i) p[i] = v[i];
}

// u(g) and its derivative, for which the activation of the gate g is g sigmoid(u(g)).
constexpr float kGeluLinear = 1.5957691216057308f;  // 2 sqrt(2 / pi)
constexpr float kGeluCubic = 0.044715f * kGeluLinear;
template <GateActivation kActivation>
TANDEM_INLINE Vec GateArgument(Vec g) {
  if constexpr (kActivation == GateActivation::kSilu) return g;
  return g * (g * g * kGeluCubic + kGeluLinear);
}
template <GateActivation kActivation>
TANDEM_INLINE Vec GateSlope(Vec g) {
  if constexpr (kActivation == GateActivation::kSilu) return Splat(1.0f);
  return g * g * (3 * kGeluCubic) + kGeluLinear;
}

template <GateActivation kActivation>
TANDEM_INLINE void GatedRows(const GatedArgs& a) {
  for (int64_t row = 0; row < a.rows; ++row) {
    const float* gate = a.gate + row * a.in_stride;
    const float* up = a.up + row * a.in_stride;
    float* y = a.y + row * a.y_stride;
    for (int64_t k = 0; k < a.width; k += kWidth) {
      const int64_t count = Min(kWidth, a.width - k);
      const Vec g = LoadSome(gate + k, count);
      StoreSome(y + k,
                g / (1.0f + ExpMinus(GateArgument<kActivation>(g))) * LoadSome(up + k, count),
                count);
    }
  }
}

void Gated(const GatedArgs& a) {
  a.activation == GateActivation::kSilu ? GatedRows<GateActivation::kSilu>(a)
                                        : GatedRows<GateActivation::kGeluTanh>(a);
}

template <GateActivation kActivation>
TANDEM_INLINE void GatedBackwardRows(const GatedBackwardArgs& a) {
  for (int64_t row = 0; row < a.rows; ++row) {
    const float* gate = a.gate + row * a.in_stride;
    const float* up = a.up + row * a.in_stride;
    const float* dy = a.dy + row * a.dy_stride;
    float* d_gate = a.d_gate + row * a.out_stride;
    float* d_up = a.d_up + row * a.out_stride;
    for (int64_t k = 0; k < a.width; k += kWidth) {
      const int64_t count = Min(kWidth, a.width - k);
      const Vec g = LoadSome(gate + k, count), d = LoadSome(dy + k, count);
      const Vec s = 1.0f / (1.0f + ExpMinus(GateArgument<kActivation>(g)));
      const Vec slope = g * (1.0f - s) * GateSlope<kActivation>(g);
      StoreSome(d_gate + k, d * LoadSome(up + k, count) * s * (1.0f + slope), count);
      StoreSome(d_up + k, d * g * s, count);
    }
  }
}

void GatedBackward(const GatedBackwardArgs& a) {
  a.activation == GateActivation::kSilu ? GatedBackwardRows<GateActivation::kSilu>(a)
                                        : GatedBackwardRows<GateActivation::kGeluTanh>(a);
}

void SoftCap(const SoftCapArgs& a) {
  for (int64_t j = 0; j < a.count; j += kWidth) {
    const int64_t count = Min(kWidth, a.count - j);
    StoreSome(a.x + j, SoftCapped(LoadSome(a.x + j, count), a.soft_cap), count);
  }
}

TANDEM_INLINE Vec Max(Vec a, Vec b) { return a > b ? a : b; }

TANDEM_INLINE float MaxOfRow(const float* z, float scale, int64_t width) {
  float max = -__builtin_inff();
  const int64_t whole = width - width % kWidth;
  Vec highest = Splat(max);
  for (int64_t j = 0; j < whole; j += kWidth) highest = Max(highest, Load(z + j) * scale);
  for (int i = 0; i < kWidth; ++i) max = Max(max, highest[i]);
  for (int64_t j = whole; j < width; ++j) max = Max(max, z[j] * scale);
  return max;
}

// Returns z scale - max for the last `count` logits of a row; the exponential of the other lanes is
// 0.
TANDEM_INLINE Vec LastBelow(const float* z, float scale, float max, int64_t count) {
  Vec d = LoadSome(z, count) * scale - max;
  for (int64_t i = count; i < kWidth; ++i) d[i] = -100.0f;
  return d;
}

void LogitStatistics(const LogitStatisticsArgs& a) {
  for (int64_t row = 0; row < a.rows; ++row) {
    const float* z = a.logits + row * a.width;
    const float scale = a.scales == nullptr ? 1.0f : a.scales[row];
    const int64_t whole = a.width - a.width % kWidth;
    const float max = MaxOfRow(z, scale, a.width);
    Vec sum = {}, weighted = {};
    const auto add = [&](Vec d) TANDEM_INLINE_LAMBDA {
      const Vec e = Exp(d);
      sum += e;
      weighted += e * d;
    };
    for (int64_t j = 0; j < whole; j += kWidth) add(Load(z + j) * scale - max);
    if (whole < a.width) add(LastBelow(z + whole, scale, max, a.width - whole));
    a.max[row] = max;
    a.sum[row] = Sum(sum);
    a.weighted[row] = Sum(weighted);
  }
}

// Rounds to the nearest bf16, ties to even.
TANDEM_INLINE ShortVec ToBfloat16(Vec v) {
  const IVec bits = reinterpret_cast<const IVec&>(v);
  return __builtin_convertvector((bits + 0x7fff + ((bits >> 16) & 1)) >> 16, ShortVec);
}

// Writes the gradient of `count` logits of the row z, from the j-th on. In bf16 it overwrites only
// logits that have been read.
template <bool kBfloat16>
TANDEM_INLINE void StoreGradient(float* z, int64_t j, Vec dz, int64_t count) {
  if constexpr (kBfloat16) {
    const ShortVec rounded = ToBfloat16(dz);
    auto* const out = reinterpret_cast<int16_t*>(z) + j;
    if (count == kWidth) {
      *reinterpret_cast<ShortVec*>(out) = rounded;
    } else {
      for (int64_t i = 0; i < count; ++i) out[i] = rounded[i];
    }
  } else {
    StoreSome(z + j, dz, count);
  }
}

template <bool kBfloat16>
TANDEM_INLINE void LogitGradientRow(const LogitGradientArgs& a, int64_t row) {
  float* z = a.logits + row * a.width;
  const float scale = a.scales == nullptr ? 1.0f : a.scales[row];
  const float max = a.max[row], constant = a.constants[row], slope = a.slopes[row];
  for (int64_t j = 0; j < a.width; j += kWidth) {
    const int64_t count = Min(kWidth, a.width - j);
    const Vec logit = LoadSome(z + j, count), d = logit * scale - max;
    Vec dz = Exp(d) * (d * slope + constant);
    if (a.soft_cap > 0) dz *= SoftCapSlope(logit, a.soft_cap);
    StoreGradient<kBfloat16>(z, j, dz, count);
  }
}

void LogitGradient(const LogitGradientArgs& a) {
  for (int64_t row = 0; row < a.rows; ++row) {
    a.bfloat16 ? LogitGradientRow<true>(a, row) : LogitGradientRow<false>(a, row);
  }
}

template <bool kForward>
TANDEM_INLINE void DivergenceStatisticsRow(const DivergenceStatisticsArgs& a, int64_t row) {
  const float* const z = a.logits + row * a.width;
  const float* const teacher = a.teacher_logits + row * a.width;
  const float scale = a.scales == nullptr ? 1.0f : a.scales[row];
  const float max = MaxOfRow(z, scale, a.width), teacher_max = MaxOfRow(teacher, scale, a.width);
  constexpr int64_t kColumns = 2048;  // sums in float32 are kept short
  double sum = 0, teacher_sum = 0, moment = 0;
  for (int64_t begin = 0; begin < a.width; begin += kColumns) {
    const int64_t end = Min(begin + kColumns, a.width), whole = end - (end - begin) % kWidth;
    Vec e = {}, teacher_e = {}, weighted = {};
    const auto add = [&](Vec d, Vec teacher_d) TANDEM_INLINE_LAMBDA {
      const Vec p = Exp(d), q = Exp(teacher_d);
      e += p;
      teacher_e += q;
      weighted += kForward ? q * (teacher_d - d) : p * (d - teacher_d);
    };
    for (int64_t j = begin; j < whole; j += kWidth) {
      add(Load(z + j) * scale - max, Load(teacher + j) * scale - teacher_max);
    }
    if (whole < end) {
      add(LastBelow(z + whole, scale, max, end - whole),
          LastBelow(teacher + whole, scale, teacher_max, end - whole));
    }
    sum += Sum(e);
    teacher_sum += Sum(teacher_e);
    moment += Sum(weighted);
  }
  a.max[row] = max;
  a.teacher_max[row] = teacher_max;
  a.sum[row] = sum;
  a.teacher_sum[row] = teacher_sum;
  a.moment[row] = moment;
}

void DivergenceStatistics(const DivergenceStatisticsArgs& a) {
  for (int64_t row = 0; row < a.rows; ++row) {
    a.forward ? DivergenceStatisticsRow<true>(a, row) : DivergenceStatisticsRow<false>(a, row);
  }
}

template <bool kForward, bool kBfloat16>
TANDEM_INLINE void DivergenceGradientRow(const DivergenceGradientArgs& a, int64_t row) {
  float* const z = a.logits + row * a.width;
  const float* const teacher = a.teacher_logits + row * a.width;
  const float scale = a.scales == nullptr ? 1.0f : a.scales[row];
  const float max = a.max[row], teacher_max = a.teacher_max[row];
  const float factor = a.factors[row], offset = a.offsets[row];
  for (int64_t j = 0; j < a.width; j += kWidth) {
    const int64_t count = Min(kWidth, a.width - j);
    const Vec logit = LoadSome(z + j, count), d = logit * scale - max;
    const Vec teacher_d = LoadSome(teacher + j, count) * scale - teacher_max;
    Vec dz = kForward ? Exp(d) - Exp(teacher_d) * offset : Exp(d) * (d - teacher_d - offset);
    if (a.soft_cap > 0) dz *= SoftCapSlope(logit, a.soft_cap);
    StoreGradient<kBfloat16>(z, j, dz * factor, count);
  }
}

void DivergenceGradient(const DivergenceGradientArgs& a) {
  for (int64_t row = 0; row < a.rows; ++row) {
    if (a.bfloat16) {
      a.forward ? DivergenceGradientRow<true, true>(a, row)
                : DivergenceGradientRow<false, true>(a, row);
    } else {
      a.forward ? DivergenceGradientRow<true, false>(a, row)
                : DivergenceGradientRow<false, false>(a, row);
    }
  }
}

// The table entries that this file defines; packed_linear_impl.h adds the linear maps. A constant
// expression: the tables are ready before any static object asks for them.
constexpr CpuKernels SimdKernels(const char* name) {
  return {.name = name,
          .transposed_linear = TransposedLinear,
          .attention = Attention<float>,
          .bfloat16_attention = Attention<uint16_t>,
          .rms_norm = RmsNorm,
          .rms_norm_backward = RmsNormBackward,
          .rotary = Rotary,
          .gated = Gated,
          .gated_backward = GatedBackward,
          .soft_cap = SoftCap,
          .logit_statistics = LogitStatistics,
          .logit_gradient = LogitGradient,
          .divergence_statistics = DivergenceStatistics,
          .divergence_gradient = DivergenceGradient};
}

}  // namespace
}  // namespace tandem::kernels
// NOLINTEND(misc-definitions-in-headers)
