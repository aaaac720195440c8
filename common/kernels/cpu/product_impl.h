// The loops of the matrix products and the packing of their factors, after GotoBLAS
// (https://doi.org/10.1145/1356052.1356053) and BLIS (https://doi.org/10.1145/2764454):
//
//   for each KC of the summed index
//     for each MC rows of a                          pack them: they stay in the second-level cache
//       for each NR columns of b                     pack them: they stay in the first-level cache
//         for each MR rows of the MC                 the micro-kernel: MR x NR sums in registers
//
// MR rows of a, or NR columns of b, are packed as a micro-panel. BLIS also packs NC columns of b at
// once; here NC is NR, as a micro-panel of b is used for MC rows before the next one is packed.
//
// Included by one source file per instruction set, each with AVX-512. Everything is in an unnamed
// namespace, and of the standard library only what is always inlined is used: a function compiled
// for AVX-512 must not end up in code that runs elsewhere.
#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>

#include "common/kernels/cpu/instruction_sets.h"

// NOLINTBEGIN(misc-definitions-in-headers): text for one source file per instruction set.
namespace tandem::kernels {
namespace {

// Factors are packed in squares of 16 lines by 16 lanes. A line is a row of a or a column of b. A
// lane has 32 bits, one float or a pair of bf16; lanes go along the summed index k.
constexpr int64_t kSquare = 16;
template <typename Number>
constexpr int64_t kPerLane = static_cast<int64_t>(sizeof(uint32_t) / sizeof(Number));
template <typename Number>
constexpr int64_t kSquareK = kPerLane<Number>* kSquare;  // extent of a square along k

int64_t RoundUp(int64_t a, int64_t b) { return (a + b - 1) / b * b; }

// Memory of a thread for packed factors. It is kept, because fresh memory is slow.
template <typename Number>
class Scratch {
 public:
  ~Scratch() { std::free(data_); }

  // Throws std::bad_alloc.
  Number* Get(int64_t elements) {
    if (elements > elements_) {
      std::free(data_);
      data_ = nullptr;
      elements_ = 0;
      data_ =
          static_cast<Number*>(AllocateCacheLines(static_cast<size_t>(elements) * sizeof(Number)));
      elements_ = elements;
    }
    return data_;
  }

 private:
  Number* data_ = nullptr;
  int64_t elements_ = 0;
};

// Lines of a factor, to be packed as a micro-panel.
template <typename Number>
struct Lines {
  const Number* data;
  int64_t line_stride, k_stride;  // one of the two is 1
};

__mmask16 First16(int64_t count) {
  return static_cast<__mmask16>(count >= 16 ? 0xffff : count <= 0 ? 0 : (1 << count) - 1);
}

[[gnu::always_inline]] inline void Transpose(__m512i (&rows)[16]) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
  }
  __m512i u[16];
  for (int i = 0; i < 16; i += 4) {
    u[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    u[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    u[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    u[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  // u[4 q + c] holds the columns c, c + 4, c + 8, c + 12 of the rows 4 q .. 4 q + 3.
  for (int c = 0; c < 4; ++c) {
    const __m512i low0 = _mm512_shuffle_i32x4(u[c], u[4 + c], 0x88);
    const __m512i low1 = _mm512_shuffle_i32x4(u[8 + c], u[12 + c], 0x88);
    const __m512i high0 = _mm512_shuffle_i32x4(u[c], u[4 + c], 0xdd);
    const __m512i high1 = _mm512_shuffle_i32x4(u[8 + c], u[12 + c], 0xdd);
    rows[c] = _mm512_shuffle_i32x4(low0, low1, 0x88);
    rows[8 + c] = _mm512_shuffle_i32x4(low0, low1, 0xdd);
    rows[4 + c] = _mm512_shuffle_i32x4(high0, high1, 0x88);
    rows[12 + c] = _mm512_shuffle_i32x4(high0, high1, 0xdd);
  }
}

// ReadByLine and ReadByLane read a square from memory where lines, or numbers of one k, are
// contiguous. It has `lines` lines of length `k`; the rest is filled with zeros.

[[gnu::always_inline]] inline void ReadByLine(const float* from, int64_t stride, int64_t lines,
                                              int64_t k, __m512i (&square)[16]) {
  const __mmask16 mask = First16(k);
  for (int64_t i = 0; i < 16; ++i) {
    square[i] =
        i < lines ? _mm512_maskz_loadu_epi32(mask, from + i * stride) : _mm512_setzero_si512();
  }
}
[[gnu::always_inline]] inline void ReadByLine(const uint16_t* from, int64_t stride, int64_t lines,
                                              int64_t k, __m512i (&square)[16]) {
  const auto mask = static_cast<__mmask32>(First16(k) | (First16(k - 16) << 16));
  for (int64_t i = 0; i < 16; ++i) {
    square[i] =
        i < lines ? _mm512_maskz_loadu_epi16(mask, from + i * stride) : _mm512_setzero_si512();
  }
}

[[gnu::always_inline]] inline void ReadByLane(const float* from, int64_t stride, int64_t lines,
                                              int64_t k, __m512i (&square)[16]) {
  ReadByLine(from, stride, k, lines, square);
}
[[gnu::always_inline]] inline void ReadByLane(const uint16_t* from, int64_t stride, int64_t lines,
                                              int64_t k, __m512i (&square)[16]) {
  const __mmask16 mask = First16(lines);
  const auto row = [&](int64_t l) {
    return l < k ? _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, from + l * stride))
                 : _mm512_setzero_si512();
  };
  for (int64_t pair = 0; pair < 16; ++pair) {
    square[pair] = _mm512_or_si512(row(2 * pair), _mm512_slli_epi32(row(2 * pair + 1), 16));
  }
}

// The order of the lanes of a packed square.
enum class Order { kByLine, kByLane };

// Calls store(first line, first lane, square) for the squares of a micro-panel of `panel_lines`
// lines, of which the factor has `lines`.
template <Order order, bool contiguous_lines, typename Number, typename StoreSquare>
[[gnu::always_inline]] inline void PackSquares(const Lines<Number>& factor, int64_t panel_lines,
                                               int64_t lines, int64_t kc,
                                               const StoreSquare& store) {
  for (int64_t l = 0; l < kc; l += kSquareK<Number>) {
    for (int64_t line = 0; line < panel_lines; line += kSquare) {
      const Number* const from = factor.data + line * factor.line_stride + l * factor.k_stride;
      __m512i square[16];
      if constexpr (contiguous_lines) {
        ReadByLine(from, factor.line_stride, lines - line, kc - l, square);
      } else {
        ReadByLane(from, factor.k_stride, lines - line, kc - l, square);
      }
      if constexpr (contiguous_lines != (order == Order::kByLine)) Transpose(square);
      store(line, l / kPerLane<Number>, square);
    }
  }
}

template <Order order, typename Number, typename StoreSquare>
[[gnu::always_inline]] inline void PackPanel(const Lines<Number>& factor, int64_t panel_lines,
                                             int64_t lines, int64_t kc, const StoreSquare& store) {
  if (factor.k_stride == 1) {
    PackSquares<order, true>(factor, panel_lines, lines, kc, store);
  } else {
    PackSquares<order, false>(factor, panel_lines, lines, kc, store);
  }
}

// The entries of the product that a micro-kernel writes or adds to.
struct MicroTile {
  float* product;
  int64_t stride;
  int64_t rows, columns;  // that are left of the product: fewer than MR and NR at its edges
  bool accumulate;
};

// Writes 16 numbers of a product, or adds them to the numbers there.
[[gnu::always_inline]] inline void StoreSums(float* to, __mmask16 mask, __m512 sums,
                                             bool accumulate) {
  if (accumulate) sums = _mm512_add_ps(_mm512_maskz_loadu_ps(mask, to), sums);
  _mm512_mask_storeu_ps(to, mask, sums);
}

// A `MicroKernel` has
//   kMR, kNR      rows and columns of the product that its registers hold
//   kKC           length of the sums, so that a micro-panel of b stays in the first-level cache
//   kMCBytes      size of the packed rows of a that stay in the second-level cache
//   PackA, PackB  (Lines, how many there are, kc, micro-panel)
//   Multiply      (micro-panel of a, micro-panel of b, kc, MicroTile)

// Multiplies over [first_k, first_k + kc) of the summed index.
template <typename MicroKernel, typename Number>
void MultiplyKc(const ProductArgs<Number>& args, int64_t first_k, int64_t kc, bool accumulate) {
  constexpr int64_t kMR = MicroKernel::kMR, kNR = MicroKernel::kNR;
  const int64_t padded_kc = std::max(RoundUp(kc, kSquareK<Number>), kSquareK<Number>);
  const int64_t a_panel = padded_kc * kMR, b_panel = padded_kc * kNR;  // sizes
  const int64_t panels_per_mc =
      std::min((args.m + kMR - 1) / kMR,
               1 + MicroKernel::kMCBytes / (a_panel * static_cast<int64_t>(sizeof(Number))));
  const int64_t mc = panels_per_mc * kMR;
  static thread_local Scratch<Number> scratch;
  Number* const packed_b = scratch.Get(b_panel + panels_per_mc * a_panel);
  Number* const packed_a = packed_b + b_panel;
  const Number* const a = args.a + first_k * args.a_column_stride;
  const Number* const b = args.b + first_k * args.b_row_stride;
  for (int64_t row = 0; row < args.m; row += mc) {
    const int64_t rows = std::min(mc, args.m - row);
    for (int64_t i = 0; i < rows; i += kMR) {
      MicroKernel::PackA(
          {a + (row + i) * args.a_row_stride, args.a_row_stride, args.a_column_stride}, rows - i,
          kc, packed_a + i / kMR * a_panel);
    }
    for (int64_t j = 0; j < args.n; j += kNR) {
      MicroKernel::PackB({b + j * args.b_column_stride, args.b_column_stride, args.b_row_stride},
                         args.n - j, kc, packed_b);
      for (int64_t i = 0; i < rows; i += kMR) {
        MicroKernel::Multiply(packed_a + i / kMR * a_panel, packed_b, kc,
                              {args.product + (row + i) * args.product_stride + j,
                               args.product_stride, rows - i, args.n - j, accumulate});
      }
    }
  }
}

template <typename MicroKernel, typename Number>
void Multiply(const ProductArgs<Number>& args) {
  const int64_t chunks = std::max<int64_t>((args.k + MicroKernel::kKC - 1) / MicroKernel::kKC, 1);
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    const int64_t begin = args.k * chunk / chunks, end = args.k * (chunk + 1) / chunks;
    MultiplyKc<MicroKernel>(args, begin, end - begin, args.accumulate || chunk > 0);
  }
}

}  // namespace
}  // namespace tandem::kernels
// NOLINTEND(misc-definitions-in-headers)
