// The micro-kernel of matrix products on the vector registers of AVX-512. Included by one source
// file per type of the factors.
#include "common/kernels/cpu/product_impl.h"
#include "common/kernels/cpu/unroll.h"

// NOLINTBEGIN(misc-definitions-in-headers): text for one source file per type.
namespace tandem::kernels {
namespace {

// Micro-panels are packed lane after lane. A vector of b's panel holds a lane of 16 columns; a lane
// of a row of a is broadcast to a vector. The sums take 24 registers. `Arithmetic` has
// MultiplyAdd(__m512i a, __m512i b, __m512 sum) for 16 lanes.
template <typename Number, typename Arithmetic>
struct VectorMicroKernel {
  static constexpr int64_t kMR = 12, kNR = 32, kVectors = kNR / 16;
  static constexpr int64_t kKC = 320 * kPerLane<Number>;
  static constexpr int64_t kMCBytes = 512 << 10;

  template <int64_t kPanelLines>
  static void Pack(const Lines<Number>& factor, int64_t lines, int64_t kc, Number* panel) {
    PackPanel<Order::kByLane>(factor, kPanelLines, lines, kc,
                              [&](int64_t line, int64_t lane, const __m512i(&square)[16]) {
                                auto* const to =
                                    reinterpret_cast<uint32_t*>(panel) + lane * kPanelLines + line;
                                const __mmask16 mask = First16(kPanelLines - line);
                                for (int i = 0; i < 16; ++i) {
                                  _mm512_mask_storeu_epi32(to + i * kPanelLines, mask, square[i]);
                                }
                              });
  }
  static void PackA(const Lines<Number>& rows, int64_t count, int64_t kc, Number* panel) {
    Pack<kMR>(rows, std::min(count, kMR), kc, panel);
  }
  static void PackB(const Lines<Number>& columns, int64_t count, int64_t kc, Number* panel) {
    Pack<kNR>(columns, std::min(count, kNR), kc, panel);
  }

  static void Multiply(const Number* packed_a, const Number* packed_b, int64_t kc,
                       const MicroTile& tile) {
    const auto* a = reinterpret_cast<const uint32_t*>(packed_a);
    const auto* b = reinterpret_cast<const uint32_t*>(packed_b);
    // Fetches the entries of the product while the registers work.
    for (int64_t i = 0; i < std::min(tile.rows, kMR); ++i) {
      __builtin_prefetch(tile.product + i * tile.stride, 1);
      __builtin_prefetch(tile.product + i * tile.stride + 16, 1);
    }
    __m512 sums[kMR][kVectors];
    TANDEM_UNROLL for (int64_t i = 0; i < kMR; ++i) sums[i][0] = sums[i][1] = _mm512_setzero_ps();
    const int64_t lanes = (kc + kPerLane<Number> - 1) / kPerLane<Number>;
    for (int64_t lane = 0; lane < lanes; ++lane, a += kMR, b += kNR) {
      const __m512i b0 = _mm512_load_si512(b), b1 = _mm512_load_si512(b + 16);
      TANDEM_UNROLL for (int64_t i = 0; i < kMR; ++i) {
        const __m512i ai = _mm512_set1_epi32(static_cast<int>(a[i]));
        sums[i][0] = Arithmetic::MultiplyAdd(ai, b0, sums[i][0]);
        sums[i][1] = Arithmetic::MultiplyAdd(ai, b1, sums[i][1]);
      }
    }
    const __mmask16 masks[kVectors] = {First16(tile.columns), First16(tile.columns - 16)};
    TANDEM_UNROLL for (int64_t i = 0; i < kMR; ++i) {
      if (i >= tile.rows) break;
      float* const to = tile.product + i * tile.stride;
      TANDEM_UNROLL for (int64_t v = 0; v < kVectors; ++v) {
        StoreSums(to + 16 * v, masks[v], sums[i][v], tile.accumulate);
      }
    }
  }
};

}  // namespace
}  // namespace tandem::kernels
// NOLINTEND(misc-definitions-in-headers)
