#include "common/kernels/cpu/amx_product.h"

#include <immintrin.h>

#include <cstdlib>

namespace tandem::kernels {

void AmxMatrixProduct(const AmxProductArgs& args);

namespace {

// A tile is 16 lines of 16 pairs of bf16. Of `a` a line is a row, and a tile holds line after line;
// of `b` it is a column, and a tile holds pair after pair. Pairs go along the summed index, the
// depth.
constexpr int64_t kLines = 16, kDepth = 32, kTile = kLines * kDepth;
// Two tiles of each factor make four of the product: as many as there are registers.
constexpr int64_t kPanelLines = 2 * kLines;
// Of the packed rows of `a`, which stay in the second-level cache while columns of `b` go by.
constexpr int64_t kBlockBytes = 768 << 10;
// Most depth that is summed at a time: two tiles of so much of it fit into the first-level cache.
constexpr int64_t kBlockDepth = 640;

struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t bytes_of_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// Memory of a thread that lasts: fresh memory is slow.
class Scratch {
 public:
  ~Scratch() { std::free(data_); }
  uint16_t* Get(int64_t elements) {
    if (elements > elements_) {
      std::free(data_);
      elements_ = (elements + kTile - 1) / kTile * kTile;
      data_ = static_cast<uint16_t*>(
          std::aligned_alloc(64, static_cast<size_t>(elements_) * sizeof(uint16_t)));
    }
    return data_;
  }

 private:
  uint16_t* data_ = nullptr;
  int64_t elements_ = 0;
};

int64_t Least(int64_t a, int64_t b) { return a < b ? a : b; }
int64_t Most(int64_t a, int64_t b) { return a < b ? b : a; }

// Some lines of a factor.
struct Lines {
  const uint16_t* data;
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

void Store(const __m512i (&rows)[16], uint16_t* tile) {
  for (int i = 0; i < 16; ++i) _mm512_store_si512(tile + 32 * i, rows[i]);
}

// Read a tile of `lines` lines and `depth` of the depth, the rest zeros, line after line or pair
// after pair as they lie in memory.

void ReadByLine(const uint16_t* from, int64_t stride, int64_t lines, int64_t depth,
                __m512i (&tile)[16]) {
  const auto mask = static_cast<__mmask32>(First16(depth) | (First16(depth - 16) << 16));
  for (int64_t i = 0; i < 16; ++i) {
    tile[i] =
        i < lines ? _mm512_maskz_loadu_epi16(mask, from + i * stride) : _mm512_setzero_si512();
  }
}

void ReadByPair(const uint16_t* from, int64_t stride, int64_t lines, int64_t depth,
                __m512i (&tile)[16]) {
  const __mmask16 mask = First16(lines);
  const auto row = [&](int64_t l) {
    return l < depth ? _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, from + l * stride))
                     : _mm512_setzero_si512();
  };
  for (int64_t pair = 0; pair < 16; ++pair) {
    tile[pair] = _mm512_or_si512(row(2 * pair), _mm512_slli_epi32(row(2 * pair + 1), 16));
  }
}

// Packs a panel: two tiles of every step of the depth.
template <bool by_line, bool lies_by_line>
void PackLines(const Lines& factor, int64_t lines, int64_t depth, uint16_t* panel) {
  for (int64_t l = 0; l < depth; l += kDepth) {
    for (int64_t half = 0; half < 2; ++half, panel += kTile) {
      const int64_t line = half * kLines;
      const uint16_t* const from =
          factor.data + line * factor.line_stride + l * factor.depth_stride;
      __m512i tile[16];
      if constexpr (lies_by_line) {
        ReadByLine(from, factor.line_stride, lines - line, depth - l, tile);
      } else {
        ReadByPair(from, factor.depth_stride, lines - line, depth - l, tile);
      }
      if constexpr (lies_by_line != by_line) Transpose(tile);
      Store(tile, panel);
    }
  }
}

template <bool by_line>
void PackPanel(const Lines& factor, int64_t lines, int64_t depth, uint16_t* panel) {
  (factor.depth_stride == 1 ? PackLines<by_line, true> : PackLines<by_line, false>)(factor, lines,
                                                                                    depth, panel);
}

// Registers: 0 to 3 are the product, 4 and 5 lines of a, 6 and 7 of b.
void LoadA(const uint16_t* tiles) {
  // Those of `b` are what the first-level cache should keep.
  _tile_stream_loadd(4, tiles, 64);
  _tile_stream_loadd(5, tiles + kTile, 64);
}
void LoadB(const uint16_t* tiles) {
  _tile_loadd(6, tiles, 64);
  _tile_loadd(7, tiles + kTile, 64);
}
void Multiply() {
  _tile_dpbf16ps(0, 4, 6);
  _tile_dpbf16ps(1, 4, 7);
  _tile_dpbf16ps(2, 5, 6);
  _tile_dpbf16ps(3, 5, 7);
}

// The product of two panels, [32, 32].
void MultiplyPanels(const uint16_t* a, const uint16_t* b, int64_t steps) {
  constexpr int64_t kStep = 2 * kTile;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t i = 0; i < steps; ++i) {
    LoadA(a + i * kStep);
    LoadB(b + i * kStep);
    Multiply();
  }
}

void StoreRegisters(float* product, int64_t stride) {
  const int64_t bytes = stride * static_cast<int64_t>(sizeof(float));
  _tile_stored(0, product, bytes);
  _tile_stored(1, product + kLines, bytes);
  _tile_stored(2, product + kLines * stride, bytes);
  _tile_stored(3, product + kLines * stride + kLines, bytes);
}

void StoreProduct(float* product, int64_t stride, int64_t rows, int64_t columns, bool accumulate) {
  if (!accumulate && rows >= kPanelLines && columns >= kPanelLines) {
    return StoreRegisters(product, stride);
  }
  alignas(64) float block[kPanelLines * kPanelLines];
  StoreRegisters(block, kPanelLines);
  for (int64_t i = 0; i < Least(rows, kPanelLines); ++i) {
    for (int64_t j = 0; j < Least(columns, kPanelLines); j += 16) {
      const __mmask16 mask = First16(columns - j);
      float* const to = product + i * stride + j;
      __m512 sum = _mm512_load_ps(block + i * kPanelLines + j);
      if (accumulate) sum = _mm512_add_ps(_mm512_maskz_loadu_ps(mask, to), sum);
      _mm512_mask_storeu_ps(to, mask, sum);
    }
  }
}

void Product(const AmxProductArgs& args, int64_t first_depth, int64_t depth, bool accumulate) {
  const int64_t steps = (depth + kDepth - 1) / kDepth;
  const int64_t panel = Most(steps, 1) * kDepth * kPanelLines;
  const int64_t block_panels =
      Least((args.m + kPanelLines - 1) / kPanelLines,
            1 + kBlockBytes / (panel * static_cast<int64_t>(sizeof(uint16_t))));
  static thread_local Scratch scratch;
  uint16_t* const b_panel = scratch.Get((1 + block_panels) * panel);
  uint16_t* const a_panels = b_panel + panel;
  const uint16_t* const a = args.a + first_depth * args.a_column_stride;
  const uint16_t* const b = args.b + first_depth * args.b_row_stride;
  for (int64_t row = 0; row < args.m; row += block_panels * kPanelLines) {
    const int64_t rows = Least(block_panels * kPanelLines, args.m - row);
    for (int64_t i = 0; i < rows; i += kPanelLines) {
      PackPanel</*by_line=*/true>(
          {a + (row + i) * args.a_row_stride, args.a_row_stride, args.a_column_stride}, rows - i,
          depth, a_panels + i / kPanelLines * panel);
    }
    for (int64_t j = 0; j < args.n; j += kPanelLines) {
      PackPanel</*by_line=*/false>(
          {b + j * args.b_column_stride, args.b_column_stride, args.b_row_stride}, args.n - j,
          depth, b_panel);
      for (int64_t i = 0; i < rows; i += kPanelLines) {
        MultiplyPanels(a_panels + i / kPanelLines * panel, b_panel, steps);
        StoreProduct(args.product + (row + i) * args.product_stride + j, args.product_stride,
                     rows - i, args.n - j, accumulate);
      }
    }
  }
}

}  // namespace

void AmxMatrixProduct(const AmxProductArgs& args) {
  const TileConfig config;
  _tile_loadconfig(&config);
  const int64_t blocks = Most((args.k + kBlockDepth - 1) / kBlockDepth, 1);
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t begin = args.k * block / blocks, end = args.k * (block + 1) / blocks;
    Product(args, begin, end - begin, args.accumulate || block > 0);
  }
  _tile_release();
}

}  // namespace tandem::kernels
