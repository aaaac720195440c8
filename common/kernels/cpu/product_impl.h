// What the matrix products share: packing of the factors and the order of the work. Included by one
// source file per instruction set, each with AVX-512. Everything is in an unnamed namespace and
// nothing of the standard library is instantiated: an inline function compiled for AVX-512 must not
// end up in code that runs elsewhere.
#include <immintrin.h>

#include <cstdint>
#include <cstdlib>

#include "common/kernels/cpu/product_kernels.h"

// NOLINTBEGIN(misc-definitions-in-headers): text for one source file an instruction set.
namespace tandem::kernels {
namespace {

// Factors are packed as squares of 16 lines and 16 lanes of 32 bits, one float or a pair of bf16.
// Of `a` a line is a row, of `b` a column. Lanes go along the summed index, the depth.
constexpr int64_t kLines = 16;
template <typename Number>
constexpr int64_t kPerLane = static_cast<int64_t>(sizeof(uint32_t) / sizeof(Number));
template <typename Number>
constexpr int64_t kDepth = 16 * kPerLane<Number>;  // of a square

int64_t Least(int64_t a, int64_t b) { return a < b ? a : b; }
int64_t Most(int64_t a, int64_t b) { return a < b ? b : a; }
int64_t RoundUp(int64_t a, int64_t b) { return (a + b - 1) / b * b; }

// Memory of a thread that lasts: fresh memory is slow.
template <typename Number>
class Scratch {
 public:
  ~Scratch() { std::free(data_); }
  Number* Get(int64_t elements) {
    if (elements > elements_) {
      std::free(data_);
      elements_ = RoundUp(elements, 64);
      data_ = static_cast<Number*>(
          std::aligned_alloc(64, static_cast<size_t>(elements_) * sizeof(Number)));
    }
    return data_;
  }

 private:
  Number* data_ = nullptr;
  int64_t elements_ = 0;
};

// Some lines of a factor.
template <typename Number>
struct Lines {
  const Number* data;
  int64_t line_stride, depth_stride;
};

__mmask16 First16(int64_t count) {
  return static_cast<__mmask16>(count >= 16 ? 0xffff : count <= 0 ? 0 : (1 << count) - 1);
}

// Rows become columns.
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
  // u[4 q + c] holds of rows 4 q .. 4 q + 3 the columns c, c + 4, c + 8, c + 12.
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

// Read a square of `lines` lines and `depth` of the depth, the rest zeros, line after line or lane
// after lane as they lie in memory.

[[gnu::always_inline]] inline void ReadByLine(const float* from, int64_t stride, int64_t lines,
                                              int64_t depth, __m512i (&square)[16]) {
  const __mmask16 mask = First16(depth);
  for (int64_t i = 0; i < 16; ++i) {
    square[i] =
        i < lines ? _mm512_maskz_loadu_epi32(mask, from + i * stride) : _mm512_setzero_si512();
  }
}
[[gnu::always_inline]] inline void ReadByLine(const uint16_t* from, int64_t stride, int64_t lines,
                                              int64_t depth, __m512i (&square)[16]) {
  const auto mask = static_cast<__mmask32>(First16(depth) | (First16(depth - 16) << 16));
  for (int64_t i = 0; i < 16; ++i) {
    square[i] =
        i < lines ? _mm512_maskz_loadu_epi16(mask, from + i * stride) : _mm512_setzero_si512();
  }
}

[[gnu::always_inline]] inline void ReadByLane(const float* from, int64_t stride, int64_t lines,
                                              int64_t depth, __m512i (&square)[16]) {
  ReadByLine(from, stride, depth, lines, square);
}
[[gnu::always_inline]] inline void ReadByLane(const uint16_t* from, int64_t stride, int64_t lines,
                                              int64_t depth, __m512i (&square)[16]) {
  const __mmask16 mask = First16(lines);
  const auto row = [&](int64_t l) {
    return l < depth ? _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, from + l * stride))
                     : _mm512_setzero_si512();
  };
  for (int64_t pair = 0; pair < 16; ++pair) {
    square[pair] = _mm512_or_si512(row(2 * pair), _mm512_slli_epi32(row(2 * pair + 1), 16));
  }
}

enum class Order { kByLine, kByLane };

// Calls store(first line, first lane, square) for the squares of a panel of `panel_lines`, of which
// the factor has `lines`.
template <Order order, bool lies_by_line, typename Number, typename StoreSquare>
[[gnu::always_inline]] inline void PackSquares(const Lines<Number>& factor, int64_t panel_lines,
                                               int64_t lines, int64_t depth,
                                               const StoreSquare& store) {
  for (int64_t l = 0; l < depth; l += kDepth<Number>) {
    for (int64_t line = 0; line < panel_lines; line += kLines) {
      const Number* const from = factor.data + line * factor.line_stride + l * factor.depth_stride;
      __m512i square[16];
      if constexpr (lies_by_line) {
        ReadByLine(from, factor.line_stride, lines - line, depth - l, square);
      } else {
        ReadByLane(from, factor.depth_stride, lines - line, depth - l, square);
      }
      if constexpr (lies_by_line != (order == Order::kByLine)) Transpose(square);
      store(line, l / kPerLane<Number>, square);
    }
  }
}

template <Order order, typename Number, typename StoreSquare>
[[gnu::always_inline]] inline void PackPanel(const Lines<Number>& factor, int64_t panel_lines,
                                             int64_t lines, int64_t depth,
                                             const StoreSquare& store) {
  if (factor.depth_stride == 1) {
    PackSquares<order, true>(factor, panel_lines, lines, depth, store);
  } else {
    PackSquares<order, false>(factor, panel_lines, lines, depth, store);
  }
}

// Where a kernel's product of two panels goes, or is added to.
struct Block {
  float* product;
  int64_t stride, rows, columns;  // of the rest of the product: it may have fewer than the panels
  bool accumulate;
};

// Writes 16 numbers of a product, or adds them to what is there.
[[gnu::always_inline]] inline void StoreSums(float* to, __mmask16 mask, __m512 sums,
                                             bool accumulate) {
  if (accumulate) sums = _mm512_add_ps(_mm512_maskz_loadu_ps(mask, to), sums);
  _mm512_mask_storeu_ps(to, mask, sums);
}

// A `Kernel` has
//   kRows, kColumns         of a block of the product that its registers hold
//   kPackedBytes            of the packed rows of `a` that stay in the second-level cache while
//                           columns of `b` go by
//   kMostDepth              that is summed at a time, so that a packed column of `b` stays in the
//                           first-level cache
//   PackRows, PackColumns   (Lines, how many there are, depth, panel)
//   Multiply                (packed rows, packed columns, depth, Block)

// Of the depth from `first_depth` on.
template <typename Kernel, typename Number>
void MultiplyDepth(const ProductArgs<Number>& args, int64_t first_depth, int64_t depth,
                   bool accumulate) {
  constexpr int64_t kRows = Kernel::kRows, kColumns = Kernel::kColumns;
  const int64_t padded_depth = Most(RoundUp(depth, kDepth<Number>), kDepth<Number>);
  const int64_t row_panel = padded_depth * kRows, column_panel = padded_depth * kColumns;
  const int64_t block_panels =
      Least((args.m + kRows - 1) / kRows,
            1 + Kernel::kPackedBytes / (row_panel * static_cast<int64_t>(sizeof(Number))));
  static thread_local Scratch<Number> scratch;
  Number* const columns = scratch.Get(column_panel + block_panels * row_panel);
  Number* const rows = columns + column_panel;
  const Number* const a = args.a + first_depth * args.a_column_stride;
  const Number* const b = args.b + first_depth * args.b_row_stride;
  for (int64_t row = 0; row < args.m; row += block_panels * kRows) {
    const int64_t count = Least(block_panels * kRows, args.m - row);
    for (int64_t i = 0; i < count; i += kRows) {
      Kernel::PackRows({a + (row + i) * args.a_row_stride, args.a_row_stride, args.a_column_stride},
                       count - i, depth, rows + i / kRows * row_panel);
    }
    for (int64_t j = 0; j < args.n; j += kColumns) {
      Kernel::PackColumns({b + j * args.b_column_stride, args.b_column_stride, args.b_row_stride},
                          args.n - j, depth, columns);
      for (int64_t i = 0; i < count; i += kRows) {
        Kernel::Multiply(rows + i / kRows * row_panel, columns, depth,
                         {args.product + (row + i) * args.product_stride + j, args.product_stride,
                          count - i, args.n - j, accumulate});
      }
    }
  }
}

template <typename Kernel, typename Number>
void BlockedProduct(const ProductArgs<Number>& args) {
  const int64_t parts = Most((args.k + Kernel::kMostDepth - 1) / Kernel::kMostDepth, 1);
  for (int64_t part = 0; part < parts; ++part) {
    const int64_t begin = args.k * part / parts, end = args.k * (part + 1) / parts;
    MultiplyDepth<Kernel>(args, begin, end - begin, args.accumulate || part > 0);
  }
}

}  // namespace
}  // namespace tandem::kernels
// NOLINTEND(misc-definitions-in-headers)
