// Linear maps on the vectors of simd_impl.h, which is included before this file and whose rules
// hold here.
//
// Every sum is one chain of fused multiply-adds over the inputs in ascending order, in one lane of
// a vector. How rows, panels and inputs are cut into register tiles changes no bits. A register
// tile is the outer product of R rows of x (broadcast) and P panels of weights.
//
// Few rows read the weights once, straight from the panels, and a dense matrix is transposed in
// registers. For more rows a block of inputs of a panel is widened, or transposed, into the
// first-level cache, and all tiles of rows read it there, as in GotoBLAS
// (https://doi.org/10.1145/1356052.1356053).
#include <type_traits>  // types only, no code

#include "common/kernels/weight_format.h"

#ifndef TANDEM_PACKED_TILE_ROWS
#error "define TANDEM_PACKED_TILE_ROWS and TANDEM_PACKED_SUMS before including this file"
#endif

// NOLINTBEGIN(misc-definitions-in-headers): text for one source file per instruction set.
namespace tandem::kernels {
namespace {

#define TANDEM_NOINLINE __attribute__((noinline))

constexpr int kPanel = static_cast<int>(kPanelOuts);
constexpr int kVectors = kPanel / kWidth;              // vectors of one input of a panel
constexpr int kTileRows = TANDEM_PACKED_TILE_ROWS;     // rows of the tallest register tile
constexpr int kTileSums = TANDEM_PACKED_SUMS;          // vectors of sums in a register tile
constexpr int64_t kBlockInputs = 256;                  // of a panel in the first-level cache
constexpr int64_t kBlockRows = 192;                    // whose sums are kept beside it
constexpr int64_t kMinBlockRows = 48;                  // fewer are too few to widen weights for
constexpr int64_t kSecondLevelRowFloats = 128 * 1024;  // of x in the second-level cache

typedef uint16_t HalfVec __attribute__((vector_size(kWidth * 2), aligned(2), may_alias));

// Panels of a row tile: as many as give kTileSums sums, so that enough of them are in flight.
constexpr int TilePanels(int rows) {
  int panels = 1;
  while (2 * panels * rows * kVectors <= kTileSums && panels < 8) panels *= 2;
  return panels;
}

// The formats, in words of 32 bits with one to eight inputs of one output (packed_weight.h).
// BytesOf returns the size of a panel, as PanelBytes does, whose code must not come from here. Open
// returns a group of inputs of a panel; Weight returns vector v of the weights of input
// 8 * eight + i of the group.

// Subtracting zero changes nothing, so that this is one instruction; adding it (Splat) changes -0.
TANDEM_INLINE Vec Broadcast(const float* p) { return *p - Vec{}; }
TANDEM_INLINE IVec LoadWords(const char* p) { return *reinterpret_cast<const IVec*>(p); }
TANDEM_INLINE Vec AsFloats(IVec bits) { return reinterpret_cast<const Vec&>(bits); }

struct Float32Format {
  static constexpr int64_t kGroupBytes = PanelBytes(WeightFormat::kFloat32, kGroupInputs);
  static TANDEM_INLINE int64_t BytesOf(int64_t in) { return in * kPanel * 4; }
  struct Group {
    const char* words;
  };
  static TANDEM_INLINE Group Open(const char* p) { return {p}; }
  static TANDEM_INLINE Vec Weight(const Group& group, int eight, int i, int v) {
    return AsFloats(LoadWords(group.words + 4 * ((eight * 8 + i) * kPanel + v * kWidth)));
  }
};

struct Bfloat16Format {
  static constexpr int64_t kGroupBytes = PanelBytes(WeightFormat::kBfloat16, kGroupInputs);
  static TANDEM_INLINE int64_t BytesOf(int64_t in) { return (in + 1) / 2 * kPanel * 4; }
  using Group = Float32Format::Group;
  static TANDEM_INLINE Group Open(const char* p) { return {p}; }
  static TANDEM_INLINE Vec Weight(const Group& group, int eight, int i, int v) {
    const IVec words = LoadWords(group.words + 4 * ((eight * 4 + i / 2) * kPanel + v * kWidth));
    return AsFloats(i % 2 == 0 ? words << 16 : words & static_cast<int32_t>(0xffff0000u));
  }
};

// Integers of kBits bits. The scale is applied to the weight, not to the sum of a group: the
// product is exact, so that the sum has the bits of the float32 format.
template <int kBits>
struct ScaledFormat {
  static constexpr int64_t kGroupBytes =
      PanelBytes(kBits == 8 ? WeightFormat::kInt8 : WeightFormat::kInt4, kGroupInputs);
  static constexpr int kPerWord = 32 / kBits;
  static TANDEM_INLINE int64_t BytesOf(int64_t in) {
    return (in + kGroupInputs - 1) / kGroupInputs * kGroupBytes;
  }
  struct Group {
    const char* words;
    Vec scales[kVectors];
  };
  static TANDEM_INLINE Group Open(const char* p) {
    Group group;
    group.words = p + 2 * kPanel;
    TANDEM_UNROLL for (int v = 0; v < kVectors; ++v) {
      const auto& scales = *reinterpret_cast<const HalfVec*>(p + 2 * v * kWidth);
      group.scales[v] = AsFloats(__builtin_convertvector(scales, IVec) << 16);
    }
    return group;
  }
  static TANDEM_INLINE Vec Weight(const Group& group, int eight, int i, int v) {
    const int word = eight * (8 / kPerWord) + i / kPerWord;
    const IVec words = LoadWords(group.words + 4 * (word * kPanel + v * kWidth));
    const IVec q = (words << (32 - kBits - kBits * (i % kPerWord))) >> (32 - kBits);
    return __builtin_convertvector(q, Vec) * group.scales[v];
  }
};
using Int8Format = ScaledFormat<8>;
using Int4Format = ScaledFormat<4>;

// sums[r][p][v] += x[r][k] w[p][k] for `count` inputs, from the start of a group on. `panel` is the
// first of P panels, `panel_bytes` apart.
template <typename Format, int R, int P>
TANDEM_INLINE void AddProducts(const float* x, int64_t x_stride, const char* panel,
                               int64_t panel_bytes, int64_t count, Vec (&sums)[R][P][kVectors]) {
  typename Format::Group groups[P];
  const auto add = [&](int64_t k, int eight, int i) TANDEM_INLINE_LAMBDA {
    Vec w[P][kVectors];
    TANDEM_UNROLL for (int p = 0; p < P; ++p) {
      TANDEM_UNROLL for (int v = 0; v < kVectors; ++v) {
        w[p][v] = Format::Weight(groups[p], eight, i, v);
      }
    }
    TANDEM_UNROLL for (int r = 0; r < R; ++r) {
      const Vec xk = Broadcast(x + r * x_stride + k);
      TANDEM_UNROLL for (int p = 0; p < P; ++p) {
        TANDEM_UNROLL for (int v = 0; v < kVectors; ++v) sums[r][p][v] += xk * w[p][v];
      }
    }
  };
  for (int64_t begin = 0; begin < count; begin += kGroupInputs, panel += Format::kGroupBytes) {
    TANDEM_UNROLL for (int p = 0; p < P; ++p) groups[p] = Format::Open(panel + p * panel_bytes);
    const auto inputs = static_cast<int>(Min(kGroupInputs, count - begin));
    int eight = 0;
    for (; eight * 8 + 8 <= inputs; ++eight) {
      TANDEM_UNROLL for (int i = 0; i < 8; ++i) add(begin + eight * 8 + i, eight, i);
    }
    for (int i = 0; eight * 8 + i < inputs; ++i) add(begin + eight * 8 + i, eight, i);
  }
}

// A product without its weights.
struct LinearProduct {
  const float* x;
  int64_t x_stride;
  const float* bias;  // [out] or nullptr
  float* y;
  int64_t y_stride;
  int64_t rows, in;
  int64_t out;  // outputs from here on are padding
  bool accumulate;
};

// Writes the `count` outputs from `o` on of a row, of which `sums` are the sums.
TANDEM_INLINE void Finish(const LinearProduct& a, int64_t row, int64_t o, int64_t count,
                          const float* sums) {
  float* const y = a.y + row * a.y_stride + o;
  count = Min(count, a.out - o);
  for (int64_t i = 0; i < count; i += kWidth) {
    const int64_t lanes = Min(kWidth, count - i);
    Vec value = Load(sums + i);
    if (a.bias != nullptr) value += LoadSome(a.bias + o + i, lanes);
    if (a.accumulate) value = LoadSome(y + i, lanes) + value;
    StoreSome(y + i, value, lanes);
  }
}

// Adds `count` inputs of `rows` <= R rows to `sums` [rows][P * kPanel], which start at 0 if
// `first`. A function of its own for every tile, whoever calls it: they are many.
template <typename Format, int R, int P>
TANDEM_NOINLINE void AddTile(int64_t rows, const float* x, int64_t x_stride, const char* panel,
                             int64_t panel_bytes, int64_t count, bool first, float* sums) {
  if constexpr (R > 1) {
    if (rows < R) {
      return AddTile<Format, R - 1, P>(rows, x, x_stride, panel, panel_bytes, count, first, sums);
    }
  }
  Vec tile[R][P][kVectors];
  TANDEM_UNROLL for (int r = 0; r < R; ++r) {
    TANDEM_UNROLL for (int p = 0; p < P; ++p) {
      TANDEM_UNROLL for (int v = 0; v < kVectors; ++v) {
        tile[r][p][v] = first ? Vec{} : Load(sums + (r * P + p) * kPanel + v * kWidth);
      }
    }
  }
  AddProducts<Format, R, P>(x, x_stride, panel, panel_bytes, count, tile);
  TANDEM_UNROLL for (int r = 0; r < R; ++r) {
    TANDEM_UNROLL for (int p = 0; p < P; ++p) {
      TANDEM_UNROLL for (int v = 0; v < kVectors; ++v) {
        Store(sums + (r * P + p) * kPanel + v * kWidth, tile[r][p][v]);
      }
    }
  }
}

// A block of the inputs of several panels in float32.
struct FloatBlock {
  const char* panel;    // the first
  int64_t panel_bytes;  // from one panel to the next
};

template <typename Format>
struct PackedSource {
  const char* data;
  int64_t panel_bytes;

  // Returns `count` inputs, from `k` on, of P panels from `panel` on.
  template <int P>
  TANDEM_INLINE FloatBlock Read(int64_t panel, int64_t k, int64_t count, float* buffer) const {
    const char* from = data + panel * panel_bytes + k / kGroupInputs * Format::kGroupBytes;
    if constexpr (std::is_same_v<Format, Float32Format>) return {from, panel_bytes};
    for (int p = 0; p < P; ++p, from += panel_bytes) {
      float* const to = buffer + p * count * kPanel;
      const auto widen = [&](const auto& group, int64_t begin, int eight, int i)
                             TANDEM_INLINE_LAMBDA {
                               float* const at = to + (begin + eight * 8 + i) * kPanel;
                               TANDEM_UNROLL for (int v = 0; v < kVectors; ++v) {
                                 Store(at + v * kWidth, Format::Weight(group, eight, i, v));
                               }
                             };
      const char* record = from;
      for (int64_t begin = 0; begin < count; begin += kGroupInputs, record += Format::kGroupBytes) {
        const auto group = Format::Open(record);
        const auto inputs = static_cast<int>(Min(kGroupInputs, count - begin));
        int eight = 0;
        for (; eight * 8 + 8 <= inputs; ++eight) {
          TANDEM_UNROLL for (int i = 0; i < 8; ++i) widen(group, begin, eight, i);
        }
        for (int i = 0; eight * 8 + i < inputs; ++i) widen(group, begin, eight, i);
      }
    }
    return {reinterpret_cast<const char*>(buffer), count * kPanel * 4};
  }
};

// Source of lane i in the shuffles of Transpose, within each four lanes.
constexpr int UnpackLow(int i) { return (i & ~3) + ((i & 2) >> 1) + ((i & 1) ? kWidth : 0); }
constexpr int UnpackHigh(int i) { return UnpackLow(i) + 2; }

// Turns 4 x 4 numbers in each four lanes.
template <int... I>
TANDEM_INLINE void Transpose(Vec (&a)[4], std::integer_sequence<int, I...>) {
  const Vec low01 = __builtin_shufflevector(a[0], a[1], UnpackLow(I)...);
  const Vec high01 = __builtin_shufflevector(a[0], a[1], UnpackHigh(I)...);
  const Vec low23 = __builtin_shufflevector(a[2], a[3], UnpackLow(I)...);
  const Vec high23 = __builtin_shufflevector(a[2], a[3], UnpackHigh(I)...);
  a[0] = __builtin_shufflevector(low01, low23, LowLane(I)...);
  a[1] = __builtin_shufflevector(low01, low23, HighLane(I)...);
  a[2] = __builtin_shufflevector(high01, high23, LowLane(I)...);
  a[3] = __builtin_shufflevector(high01, high23, HighLane(I)...);
}

template <typename Half, int... I>
TANDEM_INLINE auto Concatenate(Half low, Half high, std::integer_sequence<int, I...>) {
  return __builtin_shufflevector(low, high, I...);
}

// Returns four numbers of each of N / 4 rows: row 0, 4 and so on.
template <int N>
TANDEM_INLINE auto LoadRows(const float* p, int64_t stride) {
  if constexpr (N == 4) {
    return *reinterpret_cast<const Vec4*>(p);
  } else {
    return Concatenate(LoadRows<N / 2>(p, stride), LoadRows<N / 2>(p + N / 2 * stride, stride),
                       std::make_integer_sequence<int, N>());
  }
}

// Calls use(k, v, weights) for the inputs [0, count) of a dense panel, `rows` rows at `w`, and the
// vectors v of its outputs; lanes from `rows` on are 0.
template <typename Use>
TANDEM_INLINE void ReadDense(const float* w, int64_t in, int64_t rows, int64_t count,
                             const Use& use) {
  int64_t k = 0;
  for (; rows >= kPanel && k + 4 <= count; k += 4) {
    TANDEM_UNROLL for (int v = 0; v < kVectors; ++v) {
      Vec a[4];
      TANDEM_UNROLL for (int i = 0; i < 4; ++i) {
        a[i] = LoadRows<kWidth>(w + (v * kWidth + i) * in + k, in);
      }
      Transpose(a, std::make_integer_sequence<int, kWidth>());
      TANDEM_UNROLL for (int i = 0; i < 4; ++i) use(k + i, v, a[i]);
    }
  }
  for (; k < count; ++k) {
    for (int v = 0; v < kVectors; ++v) {
      Vec weights = {};
      for (int i = 0; i < kWidth && v * kWidth + i < rows; ++i) {
        weights[i] = w[(v * kWidth + i) * in + k];
      }
      use(k, v, weights);
    }
  }
}

// A row-major matrix, from output `first` on.
struct DenseSource {
  const float* w;
  int64_t in, first, end;

  template <int P>
  TANDEM_INLINE FloatBlock Read(int64_t panel, int64_t k, int64_t count, float* buffer) const {
    for (int p = 0; p < P; ++p) {
      const int64_t o = first + (panel + p) * kPanel;
      float* const to = buffer + p * count * kPanel;
      ReadDense(w + o * in + k, in, end - o, count,
                [&](int64_t j, int v, Vec weights)
                    TANDEM_INLINE_LAMBDA { Store(to + j * kPanel + v * kWidth, weights); });
    }
    return {reinterpret_cast<const char*>(buffer), count * kPanel * 4};
  }
};

// The number of rows up to which P panels fit into a register tile.
template <int P>
constexpr int TileRows() {
  constexpr int kFit = kTileSums / (P * kVectors);
  return kFit < kTileRows ? kFit : kTileRows;
}

// Multiplies the rows [begin, end) by P panels from `panel` on, block by block of the inputs.
template <int P, typename Source>
TANDEM_NOINLINE void MultiplyBlocks(const LinearProduct& a, const Source& source, int64_t begin,
                                    int64_t end, int64_t panel, int64_t o) {
  constexpr int64_t kInputs = kBlockInputs / P;
  constexpr int kHeight = TileRows<P>();
  constexpr int kColumns = P * kPanel;
  alignas(64) float buffer[kInputs * kColumns];
  alignas(64) float sums[kBlockRows * kColumns];
  const int64_t rows = end - begin, tiles = (rows + kHeight - 1) / kHeight;
  int64_t k = 0;
  do {
    const int64_t count = Min(kInputs, a.in - k);
    const FloatBlock block = source.template Read<P>(panel, k, count, buffer);
    for (int64_t tile = 0; tile < tiles; ++tile) {  // equal tiles: a small one is slow
      const int64_t row = tile * rows / tiles;
      AddTile<Float32Format, kHeight, P>(
          (tile + 1) * rows / tiles - row, a.x + (begin + row) * a.x_stride + k, a.x_stride,
          block.panel, block.panel_bytes, count, k == 0, sums + row * kColumns);
    }
    k += kInputs;
  } while (k < a.in);
  for (int64_t r = 0; r < rows; ++r) Finish(a, begin + r, o, kColumns, sums + r * kColumns);
}

// Multiplies any rows by `panels` panels, of which the first output is `o`: P at a time, then one
// by one.
template <int P, typename Source>
void MultiplyRows(const LinearProduct& a, const Source& source, int64_t panel, int64_t panels,
                  int64_t o) {
  const int64_t fit = Min(Max(kSecondLevelRowFloats / Max(a.in, 1), kMinBlockRows), kBlockRows);
  const int64_t blocks = (a.rows + fit - 1) / fit;
  for (int64_t i = 0; i < blocks; ++i) {
    const int64_t begin = i * a.rows / blocks, end = (i + 1) * a.rows / blocks;
    int64_t p = 0;
    for (; p + P <= panels; p += P) {
      MultiplyBlocks<P>(a, source, begin, end, panel + p, o + p * kPanel);
    }
    for (; p < panels; ++p) {
      MultiplyBlocks<1>(a, source, begin, end, panel + p, o + p * kPanel);
    }
  }
}

// Multiplies R = a.rows rows straight from the panels.
template <typename Format, int R>
void MultiplyFewRows(const LinearProduct& a, const char* panel, int64_t panel_bytes, int64_t panels,
                     int64_t o) {
  if constexpr (R > 0) {
    if (a.rows < R) return MultiplyFewRows<Format, R - 1>(a, panel, panel_bytes, panels, o);
    constexpr int P = TilePanels(R);
    alignas(64) float sums[R * P * kPanel];
    const auto finish = [&](int count) {
      for (int64_t r = 0; r < R; ++r) Finish(a, r, o, count * kPanel, sums + r * count * kPanel);
    };
    for (; panels >= P; panels -= P, panel += P * panel_bytes, o += P * kPanel) {
      AddTile<Format, R, P>(R, a.x, a.x_stride, panel, panel_bytes, a.in, true, sums);
      finish(P);
    }
    for (; panels > 0; --panels, panel += panel_bytes, o += kPanel) {
      AddTile<Format, R, 1>(R, a.x, a.x_stride, panel, panel_bytes, a.in, true, sums);
      finish(1);
    }
  }
}

template <typename Format>
void MultiplyPacked(const PackedLinearArgs& args, const LinearProduct& a) {
  const auto* const data = static_cast<const char*>(args.w);
  const int64_t panel_bytes = Format::BytesOf(args.in);
  const int64_t panels = args.panel_end - args.panel_begin, o = args.panel_begin * kPanel;
  if (a.rows <= kTileRows) {
    MultiplyFewRows<Format, kTileRows>(a, data + args.panel_begin * panel_bytes, panel_bytes,
                                       panels, o);
  } else {
    const PackedSource<Format> source = {data, panel_bytes};
    MultiplyRows<TilePanels(kTileRows)>(a, source, args.panel_begin, panels, o);
  }
}

void PackedLinear(const PackedLinearArgs& args) {
  const LinearProduct a = {args.x,    args.x_stride, args.bias, args.y,         args.y_stride,
                           args.rows, args.in,       args.out,  args.accumulate};
  switch (args.format) {
    case WeightFormat::kFloat32:
      return MultiplyPacked<Float32Format>(args, a);
    case WeightFormat::kBfloat16:
      return MultiplyPacked<Bfloat16Format>(args, a);
    case WeightFormat::kInt8:
      return MultiplyPacked<Int8Format>(args, a);
    case WeightFormat::kInt4:
      return MultiplyPacked<Int4Format>(args, a);
    case WeightFormat::kDense:
      return;  // not packed: a caller's error
  }
}

// Multiplies R = a.rows rows by the outputs [o, end) of a row-major matrix, without a copy.
template <int R>
void MultiplyFewDenseRows(const LinearProduct& a, const float* w, int64_t o) {
  if constexpr (R > 0) {
    if (a.rows < R) return MultiplyFewDenseRows<R - 1>(a, w, o);
    for (; o < a.out; o += kPanel) {
      Vec sums[R][kVectors] = {};
      ReadDense(w + o * a.in, a.in, a.out - o, a.in,
                [&](int64_t k, int v, Vec weights) TANDEM_INLINE_LAMBDA {
                  TANDEM_UNROLL for (int r = 0; r < R; ++r) {
                    sums[r][v] += Broadcast(a.x + r * a.x_stride + k) * weights;
                  }
                });
      for (int r = 0; r < R; ++r) {
        alignas(64) float row[kPanel];
        for (int v = 0; v < kVectors; ++v) Store(row + v * kWidth, sums[r][v]);
        Finish(a, r, o, kPanel, row);
      }
    }
  }
}

void Linear(const LinearArgs& args) {
  const LinearProduct a = {args.x,    args.x_stride, args.bias,    args.y,         args.y_stride,
                           args.rows, args.in,       args.out_end, args.accumulate};
  constexpr int kFewRows = 3;
  if (a.rows <= kFewRows) return MultiplyFewDenseRows<kFewRows>(a, args.w, args.out_begin);
  const DenseSource source = {args.w, args.in, args.out_begin, args.out_end};
  const int64_t panels = (args.out_end - args.out_begin + kPanel - 1) / kPanel;
  MultiplyRows<TilePanels(kTileRows)>(a, source, 0, panels, args.out_begin);
}

// Adds the entries that this file defines to a table.
constexpr CpuKernels WithLinear(CpuKernels kernels) {
  kernels.linear = Linear;
  kernels.packed_linear = PackedLinear;
  return kernels;
}

}  // namespace
}  // namespace tandem::kernels
// NOLINTEND(misc-definitions-in-headers)
