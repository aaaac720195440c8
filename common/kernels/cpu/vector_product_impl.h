// Matrix products on the vector registers of AVX-512. Included by one source file per type of the
// factors.
#include "common/kernels/cpu/product_impl.h"
#include "common/kernels/cpu/unroll.h"

// NOLINTBEGIN(misc-definitions-in-headers): text for one source file a type.
namespace tandem::kernels {
namespace {

// Panels lie lane after lane: a vector of `b`'s is 16 columns, and each of `a`'s numbers, a row's,
// is spread over a vector. 24 registers hold the block. `Arithmetic` has
// MultiplyAdd(__m512i a, __m512i b, __m512 sum), of 16 lanes.
template <typename Number, typename Arithmetic>
struct VectorKernel {
  static constexpr int64_t kRows = 12, kColumns = 32, kVectors = kColumns / 16;
  static constexpr int64_t kPackedBytes = 512 << 10;
  static constexpr int64_t kMostDepth = 320 * kPerLane<Number>;

  template <int64_t kPanelLines>
  static void Pack(const Lines<Number>& factor, int64_t lines, int64_t depth, Number* panel) {
    PackPanel<Order::kByLane>(factor, kPanelLines, lines, depth,
                              [&](int64_t line, int64_t lane, const __m512i(&square)[16]) {
                                auto* const to =
                                    reinterpret_cast<uint32_t*>(panel) + lane * kPanelLines + line;
                                const __mmask16 mask = First16(kPanelLines - line);
                                for (int i = 0; i < 16; ++i) {
                                  _mm512_mask_storeu_epi32(to + i * kPanelLines, mask, square[i]);
                                }
                              });
  }
  static void PackRows(const Lines<Number>& rows, int64_t count, int64_t depth, Number* panel) {
    Pack<kRows>(rows, Least(count, kRows), depth, panel);
  }
  static void PackColumns(const Lines<Number>& columns, int64_t count, int64_t depth,
                          Number* panel) {
    Pack<kColumns>(columns, Least(count, kColumns), depth, panel);
  }

  static void Multiply(const Number* rows, const Number* columns, int64_t depth,
                       const Block& block) {
    const auto* a = reinterpret_cast<const uint32_t*>(rows);
    const auto* b = reinterpret_cast<const uint32_t*>(columns);
    // What lies far away is on its way while the registers work.
    for (int64_t i = 0; i < Least(block.rows, kRows); ++i) {
      __builtin_prefetch(block.product + i * block.stride, 1);
      __builtin_prefetch(block.product + i * block.stride + 16, 1);
    }
    __m512 sums[kRows][kVectors];
    TANDEM_UNROLL for (int64_t i = 0; i < kRows; ++i) sums[i][0] = sums[i][1] = _mm512_setzero_ps();
    const int64_t lanes = (depth + kPerLane<Number> - 1) / kPerLane<Number>;
    for (int64_t lane = 0; lane < lanes; ++lane, a += kRows, b += kColumns) {
      const __m512i b0 = _mm512_load_si512(b), b1 = _mm512_load_si512(b + 16);
      TANDEM_UNROLL for (int64_t i = 0; i < kRows; ++i) {
        const __m512i ai = _mm512_set1_epi32(static_cast<int>(a[i]));
        sums[i][0] = Arithmetic::MultiplyAdd(ai, b0, sums[i][0]);
        sums[i][1] = Arithmetic::MultiplyAdd(ai, b1, sums[i][1]);
      }
    }
    const __mmask16 masks[kVectors] = {First16(block.columns), First16(block.columns - 16)};
    TANDEM_UNROLL for (int64_t i = 0; i < kRows; ++i) {
      if (i >= block.rows) break;
      float* const to = block.product + i * block.stride;
      TANDEM_UNROLL for (int64_t v = 0; v < kVectors; ++v) {
        StoreSums(to + 16 * v, masks[v], sums[i][v], block.accumulate);
      }
    }
  }
};

}  // namespace
}  // namespace tandem::kernels
// NOLINTEND(misc-definitions-in-headers)
