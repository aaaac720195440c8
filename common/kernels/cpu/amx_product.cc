#include "common/kernels/cpu/product_impl.h"

namespace tandem::kernels {
namespace {

constexpr int64_t kTileNumbers = kSquare * kSquareK<uint16_t>;

struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t bytes_per_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// Configures the tile registers for its lifetime.
class TileRegisters {
 public:
  TileRegisters() {
    const TileConfig config;
    _tile_loadconfig(&config);
  }
  ~TileRegisters() { _tile_release(); }
  TileRegisters(const TileRegisters&) = delete;
  TileRegisters& operator=(const TileRegisters&) = delete;
};

// A square fills a tile register: line after line for the factor a, lane after lane for the factor
// b. Two tiles of each factor make four of the product, which takes all eight registers: 0 to 3
// hold the product, 4 and 5 the factor a, 6 and 7 the factor b.
struct AmxMicroKernel {
  static constexpr int64_t kMR = 2 * kSquare, kNR = 2 * kSquare;
  static constexpr int64_t kKC = 640;
  static constexpr int64_t kMCBytes = 768 << 10;

  template <Order order>
  static void Pack(const Lines<uint16_t>& factor, int64_t lines, int64_t kc, uint16_t* panel) {
    PackPanel<order>(factor, 2 * kSquare, lines, kc,
                     [&](int64_t, int64_t, const __m512i(&square)[16]) {
                       for (int i = 0; i < 16; ++i) _mm512_store_si512(panel + 32 * i, square[i]);
                       panel += kTileNumbers;
                     });
  }
  static void PackA(const Lines<uint16_t>& rows, int64_t count, int64_t kc, uint16_t* panel) {
    Pack<Order::kByLine>(rows, count, kc, panel);
  }
  static void PackB(const Lines<uint16_t>& columns, int64_t count, int64_t kc, uint16_t* panel) {
    Pack<Order::kByLane>(columns, count, kc, panel);
  }

  static void Multiply(const uint16_t* a, const uint16_t* b, int64_t kc, const MicroTile& tile) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t l = 0; l < kc; l += kSquareK<uint16_t>) {
      // The first-level cache should keep b, so a is streamed past it.
      _tile_stream_loadd(4, a, 64);
      _tile_stream_loadd(5, a + kTileNumbers, 64);
      _tile_loadd(6, b, 64);
      _tile_loadd(7, b + kTileNumbers, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
      a += 2 * kTileNumbers;
      b += 2 * kTileNumbers;
    }
    Store(tile);
  }

  static void StoreRegisters(float* product, int64_t stride) {
    const int64_t bytes = stride * static_cast<int64_t>(sizeof(float));
    _tile_stored(0, product, bytes);
    _tile_stored(1, product + kSquare, bytes);
    _tile_stored(2, product + kSquare * stride, bytes);
    _tile_stored(3, product + kSquare * stride + kSquare, bytes);
  }

  static void Store(const MicroTile& tile) {
    if (!tile.accumulate && tile.rows >= kMR && tile.columns >= kNR) {
      return StoreRegisters(tile.product, tile.stride);
    }
    alignas(64) float sums[kMR * kNR];
    StoreRegisters(sums, kNR);
    for (int64_t i = 0; i < std::min(tile.rows, kMR); ++i) {
      for (int64_t j = 0; j < std::min(tile.columns, kNR); j += 16) {
        StoreSums(tile.product + i * tile.stride + j, First16(tile.columns - j),
                  _mm512_load_ps(sums + i * kNR + j), tile.accumulate);
      }
    }
  }
};

}  // namespace

void AmxProduct(const ProductArgs<uint16_t>& args) {
  const TileRegisters registers;
  Multiply<AmxMicroKernel>(args);
}

}  // namespace tandem::kernels
