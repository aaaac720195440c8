#include "common/kernels/cpu/product_impl.h"

namespace tandem::kernels {

void AmxProduct(const ProductArgs<uint16_t>& args);

namespace {

constexpr int64_t kTile = kLines * kDepth<uint16_t>;

struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t bytes_of_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// A square fills a tile: of rows line after line, of columns lane after lane. Two tiles of each
// factor make four of the product, as many as there are registers: 0 to 3 are the product, 4 and 5
// rows, 6 and 7 columns.
struct AmxKernel {
  static constexpr int64_t kRows = 2 * kLines, kColumns = 2 * kLines;
  static constexpr int64_t kPackedBytes = 768 << 10;
  static constexpr int64_t kMostDepth = 640;

  template <Order order>
  static void Pack(const Lines<uint16_t>& factor, int64_t lines, int64_t depth, uint16_t* panel) {
    PackPanel<order>(factor, 2 * kLines, lines, depth,
                     [&](int64_t, int64_t, const __m512i(&square)[16]) {
                       for (int i = 0; i < 16; ++i) _mm512_store_si512(panel + 32 * i, square[i]);
                       panel += kTile;
                     });
  }
  static void PackRows(const Lines<uint16_t>& rows, int64_t count, int64_t depth, uint16_t* panel) {
    Pack<Order::kByLine>(rows, count, depth, panel);
  }
  static void PackColumns(const Lines<uint16_t>& columns, int64_t count, int64_t depth,
                          uint16_t* panel) {
    Pack<Order::kByLane>(columns, count, depth, panel);
  }

  static void Multiply(const uint16_t* rows, const uint16_t* columns, int64_t depth,
                       const Block& block) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t l = 0; l < depth; l += kDepth<uint16_t>) {
      // Columns are what the first-level cache should keep.
      _tile_stream_loadd(4, rows, 64);
      _tile_stream_loadd(5, rows + kTile, 64);
      _tile_loadd(6, columns, 64);
      _tile_loadd(7, columns + kTile, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
      rows += 2 * kTile;
      columns += 2 * kTile;
    }
    Store(block);
  }

  static void StoreRegisters(float* product, int64_t stride) {
    const int64_t bytes = stride * static_cast<int64_t>(sizeof(float));
    _tile_stored(0, product, bytes);
    _tile_stored(1, product + kLines, bytes);
    _tile_stored(2, product + kLines * stride, bytes);
    _tile_stored(3, product + kLines * stride + kLines, bytes);
  }

  static void Store(const Block& block) {
    if (!block.accumulate && block.rows >= kRows && block.columns >= kColumns) {
      return StoreRegisters(block.product, block.stride);
    }
    alignas(64) float sums[kRows * kColumns];
    StoreRegisters(sums, kColumns);
    for (int64_t i = 0; i < Least(block.rows, kRows); ++i) {
      for (int64_t j = 0; j < Least(block.columns, kColumns); j += 16) {
        StoreSums(block.product + i * block.stride + j, First16(block.columns - j),
                  _mm512_load_ps(sums + i * kColumns + j), block.accumulate);
      }
    }
  }
};

}  // namespace

void AmxProduct(const ProductArgs<uint16_t>& args) {
  const TileConfig config;
  _tile_loadconfig(&config);
  BlockedProduct<AmxKernel>(args);
  _tile_release();
}

}  // namespace tandem::kernels
