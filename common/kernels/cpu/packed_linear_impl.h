// Linear maps on the vectors of simd_impl.h, which is included before this file and whose rules
// hold here.
//
// Every sum is one chain of fused multiply-adds over the inputs in ascending order, in one lane of
// a vector. How rows, panels and inputs are cut into register tiles changes no bits. A register
// tile is the outer product of R rows of x (broadcast) and P panels of weights.
//
// A block of inputs of some panels is multiplied by all tiles of rows before the next one, so that
// it is read from memory once. For few rows the tiles read the panels themselves, and a dense
// matrix is transposed in registers. For more rows the block is widened, or transposed, into the
// first-level cache, as in GotoBLAS (https://doi.org/10.1145/1356052.1356053). Each tile fetches
// its part of the next block into the second-level cache, so that memory works while all of them
// are multiplied.
//
// Two consecutive bf16 take the place of a float32: a word. A map of bf16 is the same work on half
// as many inputs, with a multiplication of its own.
#include <type_traits>  // types only, no code

#include "common/kernels/cpu/packed_weight.h"

#ifndef TANDEM_PACKED_TILE_ROWS
#error "define TANDEM_PACKED_TILE_ROWS and TANDEM_PACKED_SUMS before including this file"
#endif

// NOLINTBEGIN(misc-definitions-in-headers): text for one source file per instruction set.
namespace tandem::kernels {
namespace {

#define TANDEM_NOINLINE __attribute__((noinline))

constexpr int kPanel = static_cast<int>(kPanelOuts);
constexpr int kVectors = kPanel / kWidth;           // vectors of one input of a panel
constexpr int kTileRows = TANDEM_PACKED_TILE_ROWS;  // rows of the tallest register tile
constexpr int kTileSums = TANDEM_PACKED_SUMS;       // vectors of sums in a register tile
constexpr int64_t kCacheLine = 64;
constexpr int64_t kStraightInputs = 512;               // of panels that are read as they are
constexpr int64_t kBlockInputs = 256;                  // of a panel in the first-level cache
constexpr int64_t kBlockRows = 192;                    // whose sums are kept beside it
constexpr int64_t kMinBlockRows = 48;                  // fewer are too few to widen weights for
constexpr int64_t kSecondLevelRowFloats = 128 * 1024;  // of x in the second-level cache

constexpr int kUnits = 2 * kWidth < kPanel ? 2 * kWidth : kPanel;  // 16-bit units in a vector

typedef uint16_t UnitVec __attribute__((vector_size(kUnits * 2), aligned(2), may_alias));

// Panels of a row tile: as many as give kTileSums sums, so that enough of them are in flight, if
// registers hold the weights of an input beside them. One row takes one panel after the other.
constexpr int TilePanels(int rows) {
  constexpr int kRegisters = kTileSums / 3 * 4;
  const auto fit = [rows](int panels) {
    const int sums = panels * rows * kVectors;
    const int weights = (rows == 1 ? 1 : panels) * kVectors;
    return sums <= kTileSums && sums + weights < kRegisters;
  };
  int panels = 1;
  while (panels < 8 && fit(2 * panels)) panels *= 2;
  return panels;
}

// Subtracting zero changes nothing, so that this is one instruction; adding it (Splat) changes -0.
TANDEM_INLINE Vec Broadcast(const float* p) { return *p - Vec{}; }
TANDEM_INLINE IVec LoadWords(const char* p) { return *reinterpret_cast<const IVec*>(p); }
TANDEM_INLINE UnitVec LoadUnits(const char* p) { return *reinterpret_cast<const UnitVec*>(p); }
TANDEM_INLINE Vec AsFloats(IVec bits) { return reinterpret_cast<const Vec&>(bits); }
TANDEM_INLINE IVec AsBits(Vec words) { return reinterpret_cast<const IVec&>(words); }

// Source of 16-bit unit i in the interleaving of the first halves of each eight units.
constexpr int InterleaveLow(int i) { return (i & ~7) + (i & 7) / 2 + ((i & 1) ? kUnits : 0); }

// Returns words of 32 bits, unit i of `high` above unit i of `low`. `units` are in the order of a
// panel (packed_weight.h), the words in the order of the outputs.
template <int... I>
TANDEM_INLINE void InterleaveUnits(UnitVec low, UnitVec high, Vec* first, Vec* second,
                                   std::integer_sequence<int, I...>) {
  const auto a = __builtin_shufflevector(low, high, InterleaveLow(I)...);
  const auto b = __builtin_shufflevector(low, high, InterleaveLow(I) + 4 ...);
  *first = reinterpret_cast<const Vec&>(a);
  *second = reinterpret_cast<const Vec&>(b);
}

// Calls units(i, low, high) to fill the i-th vector of units of a panel, and joins them to words.
template <typename Units>
TANDEM_INLINE void Interleave(const Units& units, Vec (&words)[kVectors]) {
  constexpr int kPairs = kVectors / 2;
  TANDEM_UNROLL for (int i = 0; i < kPairs; ++i) {
    UnitVec low = {}, high = {};
    units(i, low, high);
    InterleaveUnits(low, high, &words[i], &words[i + kPairs],
                    std::make_integer_sequence<int, kUnits>());
  }
}

template <int... I>
TANDEM_INLINE Vec SwapUnitOrder(Vec v, std::integer_sequence<int, I...>) {
  return __builtin_shufflevector(v, v, UnitOfLane(I)...);
}

// Turns the order of units into that of outputs, and back.
template <bool Units>
TANDEM_INLINE Vec InOrder(Vec v) {
  if constexpr (Units) {
    return SwapUnitOrder(v, std::make_integer_sequence<int, kWidth>());
  } else {
    return v;
  }
}

// The words of inputs and weights: Broadcast fills a vector with a word of x, and MultiplyAdd adds
// its products with the weights of as many outputs.
struct FloatWords {
  static constexpr int64_t kStraightRows = 32;
  static TANDEM_INLINE Vec Broadcast(const float* p) { return kernels::Broadcast(p); }
  static TANDEM_INLINE void MultiplyAdd(Vec x, Vec w, Vec& sum) { sum += x * w; }
};
struct PairWords {
  static constexpr int64_t kStraightRows = 12;
  static TANDEM_INLINE Vec Broadcast(const float* p) {
    typedef int32_t Word __attribute__((may_alias));
    return AsFloats(*reinterpret_cast<const Word*>(p) - IVec{});
  }
  static TANDEM_INLINE void MultiplyAdd(Vec x, Vec w, Vec& sum) {
#ifdef __AVX512BF16__
    sum = _mm512_dpbf16_ps(reinterpret_cast<__m512>(sum), reinterpret_cast<__m512bh>(x),
                           reinterpret_cast<__m512bh>(w));
#else
    sum += Second(x) * Second(w);
    sum += First(x) * First(w);
#endif
  }
  static TANDEM_INLINE Vec First(Vec words) { return AsFloats(AsBits(words) << 16); }
  static TANDEM_INLINE Vec Second(Vec words) {
    return AsFloats(AsBits(words) & static_cast<int32_t>(0xffff0000u));
  }
};

// The formats. BytesOf returns the size of a panel, as PanelBytes does, whose code must not come
// from here. Open returns a group of inputs of a panel; Weights returns the weights of all outputs
// for input 8 * eight + i of the group, in the order of units if kUnitOrder. Up to kStraightRows
// rows are multiplied straight from the panels: every tile of rows widens the weights again, which
// takes longer than a copy in the first-level cache if the weights are scaled. A tile has at most
// kRows of them; from kFetchRows on it fetches weights. Several tiles share blocks of kTiledInputs.
// With kIsWords the panels are what tiles read. The inputs are words, and multiplied as Words says.

template <typename WordsOfInputs>
struct WordFormat {
  using Words = WordsOfInputs;
  static constexpr bool kIsWords = true;
  static constexpr bool kUnitOrder = false;
  static constexpr int64_t kStraightRows = Words::kStraightRows;
  static constexpr int kRows = kTileRows;
  static constexpr int kFetchRows = 4;
  static constexpr int64_t kTiledInputs = kStraightInputs;
  static constexpr int64_t kGroupBytes = PanelBytes(WeightFormat::kFloat32, kGroupInputs);
  static TANDEM_INLINE int64_t BytesOf(int64_t in) { return in * kPanel * 4; }
  struct Group {
    const char* words;
  };
  static TANDEM_INLINE Group Open(const char* p) { return {p}; }
  static TANDEM_INLINE void Weights(const Group& group, int eight, int i, Vec (&w)[kVectors]) {
    TANDEM_UNROLL for (int v = 0; v < kVectors; ++v) {
      w[v] = AsFloats(LoadWords(group.words + 4 * ((eight * 8 + i) * kPanel + v * kWidth)));
    }
  }
};
using Float32Format = WordFormat<FloatWords>;
// Weights in kBfloat16 for inputs in bf16.
using PairFormat = WordFormat<PairWords>;

// Weights in kBfloat16 for inputs in float32.
struct Bfloat16Format {
  using Words = FloatWords;
  static constexpr bool kIsWords = false;
  static constexpr bool kUnitOrder = false;
  static constexpr int64_t kStraightRows = 32;
  static constexpr int kRows = kTileRows;
  static constexpr int kFetchRows = 2;
  static constexpr int64_t kTiledInputs = kVectors == 1 ? 128 : kStraightInputs;
  static constexpr int64_t kGroupBytes = PanelBytes(WeightFormat::kBfloat16, kGroupInputs);
  static TANDEM_INLINE int64_t BytesOf(int64_t in) { return (in + 1) / 2 * kPanel * 4; }
  using Group = Float32Format::Group;
  static TANDEM_INLINE Group Open(const char* p) { return {p}; }
  static TANDEM_INLINE void Weights(const Group& group, int eight, int i, Vec (&w)[kVectors]) {
    TANDEM_UNROLL for (int v = 0; v < kVectors; ++v) {
      const IVec words = LoadWords(group.words + 4 * ((eight * 4 + i / 2) * kPanel + v * kWidth));
      w[v] = AsFloats(i % 2 == 0 ? words << 16 : words & static_cast<int32_t>(0xffff0000u));
    }
  }
};

// Integers of kBits bits. The scale is applied to the weight, not to the sum of a group: the
// product is exact, so that the sum has the bits of the float32 format.
//
// An integer u = q + kBias is widened without a conversion: its bits, above zeros, are the lower 16
// bits of a float32 between 2^(23 - 16 + kBits) and twice that, whose value is that power plus u.
// Then q scale = value * scale - (power + kBias) * scale, and all of these are exact.
template <int kBits>
struct ScaledFormat {
  using Words = FloatWords;
  static constexpr bool kIsWords = false;
  // Where a vector has all outputs of a panel, units become words in their own order: interleaving
  // takes two or three instructions there, widening one.
  static constexpr bool kUnitOrder = kWidth == kPanel;
  static constexpr int64_t kStraightRows = 8;
  // Scales take registers, too.
  static constexpr int kRows = kVectors == 2 ? kTileRows - 1 : kTileRows;
  static constexpr int kFetchRows = 1;
  static constexpr int64_t kTiledInputs = kStraightInputs;
  static constexpr int64_t kGroupBytes =
      PanelBytes(kBits == 8 ? WeightFormat::kInt8 : WeightFormat::kInt4, kGroupInputs);
  static constexpr int kPerUnit = 16 / kBits;
  static constexpr int kExponent = 7 + kBits;
  static constexpr auto kHighBits = static_cast<uint16_t>((127 + kExponent) << 7);
  static constexpr float kOffset = (1 << kExponent) + (1 << (kBits - 1));
  static TANDEM_INLINE int64_t BytesOf(int64_t in) {
    return (in + kGroupInputs - 1) / kGroupInputs * kGroupBytes;
  }
  struct Group {
    const char* units;
    Vec scales[kVectors];
    Vec offsets[kVectors];
  };
  static TANDEM_INLINE Group Open(const char* p) {
    Group group;
    group.units = p + 2 * kPanel;
    if constexpr (kUnitOrder) {
      group.scales[0] = Load(reinterpret_cast<const uint16_t*>(p));
    } else {
      Interleave([&](int i, UnitVec&, UnitVec& high)
                     TANDEM_INLINE_LAMBDA { high = LoadUnits(p + 2 * i * kUnits); },
                 group.scales);
    }
    TANDEM_UNROLL for (int v = 0; v < kVectors; ++v) {
      group.offsets[v] = group.scales[v] * kOffset;
    }
    return group;
  }
  static TANDEM_INLINE void Weights(const Group& group, int eight, int i, Vec (&w)[kVectors]) {
    const char* const from = group.units + 2 * kPanel * (eight * (8 / kPerUnit) + i / kPerUnit);
    const int shift = 16 - kBits - kBits * (i % kPerUnit);
    constexpr uint16_t kMask = 0x10000 - (1 << (16 - kBits));
    if constexpr (kUnitOrder) {
      const UIntVec words = LoadWidened(reinterpret_cast<const uint16_t*>(from));
      const UIntVec bits = (words << shift & kMask) | uint32_t{kHighBits} << 16;
      w[0] = reinterpret_cast<const Vec&>(bits);
    } else {
      Interleave(
          [&](int j, UnitVec& low, UnitVec& high) TANDEM_INLINE_LAMBDA {
            low = LoadUnits(from + 2 * j * kUnits) << shift;
            // The first integer of a unit has no other below it.
            if (i % kPerUnit != 0) low &= kMask;
            high = UnitVec{} + kHighBits;
          },
          w);
    }
    TANDEM_UNROLL for (int v = 0; v < kVectors; ++v) {
      w[v] = w[v] * group.scales[v] - group.offsets[v];
    }
  }
};
using Int8Format = ScaledFormat<8>;
using Int4Format = ScaledFormat<4>;

// Panels of words in a tile that the processor follows as streams better than it fetches them.
constexpr int kStreamedPanels = 4;

// Panels of a tile that reads them as they are. Fetched panels of words are read one by one: two
// streams have half the rate of one.
template <typename Format>
constexpr int StraightPanels(int rows) {
  const int panels = TilePanels(rows);
  const bool fetched = rows >= Format::kFetchRows && panels < kStreamedPanels;
  return Format::kIsWords && fetched ? 1 : panels;
}

// Weights to be fetched into the second-level cache while a tile is multiplied: with each group of
// inputs that is multiplied, the bytes [begin, end) of a group of those to come, of each of `count`
// panels or rows.
struct Ahead {
  const char* at;
  int64_t count, stride, group_bytes;
  bool by_eights;  // all of a group of the tile's own panels, a part with each eight inputs
  int64_t begin = 0, end = group_bytes;

  // Part i of `parts`: some of the panels or rows, or some of the cache lines of each.
  Ahead Part(int64_t i, int64_t parts) const {
    const int64_t lines = (group_bytes + kCacheLine - 1) / kCacheLine;
    Ahead part = *this;
    if (count > lines) {
      const int64_t first = i * count / parts;
      part.at += first * stride;
      part.count = (i + 1) * count / parts - first;
    } else {
      part.begin = i * lines / parts * kCacheLine;
      part.end = (i + 1) * lines / parts * kCacheLine;
    }
    return part;
  }
  static TANDEM_INLINE void FetchLine(const char* p) {
    constexpr int kRead = 0, kSecondLevel = 2;
    __builtin_prefetch(p, kRead, kSecondLevel);
  }
  TANDEM_INLINE void FetchGroup() const {
    if (by_eights) return;
    for (int64_t r = 0; r < count; ++r) {
      for (int64_t b = begin; b < end; b += kCacheLine) FetchLine(at + r * stride + b);
    }
  }
  // Lines that are asked for together wait for each other, and the products for them.
  template <typename Format, int P>
  TANDEM_INLINE void FetchEight(int eight) const {
    if (!by_eights) return;
    constexpr int kEights = kGroupInputs / 8;
    constexpr auto kLines = static_cast<int>((Format::kGroupBytes + kCacheLine - 1) / kCacheLine);
    constexpr int kPart = (kLines + kEights - 1) / kEights;
    TANDEM_UNROLL for (int p = 0; p < P; ++p) {
      TANDEM_UNROLL for (int i = 0; i < kPart; ++i) {
        const int line = eight * kPart + i;
        if (kLines % kPart == 0 || line < kLines) FetchLine(at + p * stride + line * kCacheLine);
      }
    }
  }
};

// Inputs of several panels, from the start of a group on.
struct Block {
  const char* panel;    // the first
  int64_t panel_bytes;  // from one panel to the next
  int64_t count;        // of inputs
};

template <int C>
using Panels = std::integral_constant<int, C>;

// sums[r][p][v] += x[r][k] w[p][k] for the inputs of a block of P panels.
template <typename Format, int R, int P>
TANDEM_INLINE void AddProducts(const float* x, int64_t x_stride, const Block& block, Ahead ahead,
                               Vec (&sums)[R][P][kVectors]) {
  const char* panel = block.panel;
  typename Format::Group groups[P];
  // Adds input k for C panels from p on.
  const auto add = [&]<int C>(Panels<C>, int64_t k, int p, int eight, int i) TANDEM_INLINE_LAMBDA {
    Vec w[C][kVectors];
    TANDEM_UNROLL for (int c = 0; c < C; ++c) Format::Weights(groups[p + c], eight, i, w[c]);
    TANDEM_UNROLL for (int r = 0; r < R; ++r) {
      const Vec xk = Format::Words::Broadcast(x + r * x_stride + k);
      TANDEM_UNROLL for (int c = 0; c < C; ++c) {
        TANDEM_UNROLL for (int v = 0; v < kVectors; ++v) {
          Format::Words::MultiplyAdd(xk, w[c][v], sums[r][p + c][v]);
        }
      }
    }
  };
  for (int64_t begin = 0; begin < block.count;
       begin += kGroupInputs, panel += Format::kGroupBytes, ahead.at += ahead.group_bytes) {
    ahead.FetchGroup();
    TANDEM_UNROLL for (int p = 0; p < P; ++p) groups[p] =
        Format::Open(panel + p * block.panel_bytes);
    const auto inputs = static_cast<int>(Min(kGroupInputs, block.count - begin));
    int eight = 0;
    for (; eight * 8 + 8 <= inputs; ++eight) {
      ahead.template FetchEight<Format, P>(eight);
      if constexpr (R == 1) {
        // The vectors of a panel are used together, so that its scales stay in registers. With more
        // rows that would keep the inputs of eight of them there.
        TANDEM_UNROLL for (int p = 0; p < P; ++p) {
          TANDEM_UNROLL for (int i = 0; i < 8; ++i) {
            add(Panels<1>(), begin + eight * 8 + i, p, eight, i);
          }
        }
      } else {
        TANDEM_UNROLL for (int i = 0; i < 8; ++i) {
          add(Panels<P>(), begin + eight * 8 + i, 0, eight, i);
        }
      }
    }
    for (int i = 0; eight * 8 + i < inputs; ++i) {
      add(Panels<P>(), begin + eight * 8 + i, 0, eight, i);
    }
  }
}

// A product without its weights. Inputs are words.
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

// Adds the inputs of a block of `rows` <= R rows to `sums` [rows][P * kPanel], which start at 0 if
// `first`. A function of its own for every tile, whoever calls it: they are many.
template <typename Format, int R, int P>
TANDEM_NOINLINE void AddTile(int64_t rows, const float* x, int64_t x_stride, const Block& block,
                             const Ahead& ahead, bool first, float* sums) {
  if constexpr (R > 1) {
    if (rows < R) return AddTile<Format, R - 1, P>(rows, x, x_stride, block, ahead, first, sums);
  }
  Vec tile[R][P][kVectors];
  TANDEM_UNROLL for (int r = 0; r < R; ++r) {
    TANDEM_UNROLL for (int p = 0; p < P; ++p) {
      TANDEM_UNROLL for (int v = 0; v < kVectors; ++v) {
        const float* const from = sums + (r * P + p) * kPanel + v * kWidth;
        tile[r][p][v] = first ? Vec{} : InOrder<Format::kUnitOrder>(Load(from));
      }
    }
  }
  AddProducts<Format, R, P>(x, x_stride, block, ahead, tile);
  TANDEM_UNROLL for (int r = 0; r < R; ++r) {
    TANDEM_UNROLL for (int p = 0; p < P; ++p) {
      TANDEM_UNROLL for (int v = 0; v < kVectors; ++v) {
        Store(sums + (r * P + p) * kPanel + v * kWidth, InOrder<Format::kUnitOrder>(tile[r][p][v]));
      }
    }
  }
}

// A source reads blocks of `count` inputs, from `k` on, of the P panels from `panel` on. Its
// `Blocks` give their format, the most inputs and rows of one, and whether Read copies it to
// `buffer` [P][count][kPanel]. Fetch returns the weights that tiles of at most R rows fetch of a
// block before it is read.

// Blocks that are widened or transposed.
template <typename WordsOfInputs>
struct CopiedBlocks {
  using Format = WordFormat<WordsOfInputs>;
  template <int P>
  static constexpr int64_t kInputs = kBlockInputs / P;
  static constexpr int64_t kRows = kBlockRows;
  static constexpr bool kCopies = true;
};

// Packed panels, as they are.
template <typename PanelFormat, int R>
struct StraightSource {
  struct Blocks {
    using Format = PanelFormat;
    static constexpr bool kTiles = R == Format::kRows;  // rows of several tiles, or of the tallest
    template <int P>
    static constexpr int64_t kInputs = kTiles ? Format::kTiledInputs : kStraightInputs;
    static constexpr int64_t kRows = kTiles ? Format::kStraightRows : R;
    static constexpr bool kCopies = false;
  };

  const char* data;
  int64_t panel_bytes;

  const char* At(int64_t panel, int64_t k) const {
    return data + panel * panel_bytes + k / kGroupInputs * PanelFormat::kGroupBytes;
  }
  // Fetching costs an instruction for each cache line, and where little else is done with a line
  // the processor alone is faster; so it is with many panels of words, each a stream of its own.
  template <int P>
  TANDEM_INLINE Ahead Fetch(int64_t panel, int64_t k) const {
    constexpr bool kStreams = PanelFormat::kIsWords && P >= kStreamedPanels;
    constexpr bool kFetches = R >= PanelFormat::kFetchRows && !kStreams;
    return {At(panel, k), kFetches ? P : 0, panel_bytes, PanelFormat::kGroupBytes,
            kFetches && !Blocks::kTiles};
  }
  template <int P>
  TANDEM_INLINE Block Read(int64_t panel, int64_t k, int64_t count, float*) const {
    return {At(panel, k), panel_bytes, count};
  }
};

// Widens the first `count` inputs of a panel, which begins at `record`: those of input k are
// written to `to` + k * stride.
template <typename Panel>
TANDEM_INLINE void WidenInputs(const char* record, int64_t count, float* to, int64_t stride) {
  const auto widen = [&](const auto& group, int64_t begin, int eight, int i) TANDEM_INLINE_LAMBDA {
    float* const at = to + (begin + eight * 8 + i) * stride;
    Vec w[kVectors];
    Panel::Weights(group, eight, i, w);
    TANDEM_UNROLL for (int v = 0; v < kVectors; ++v) {
      Store(at + v * kWidth, InOrder<Panel::kUnitOrder>(w[v]));
    }
  };
  for (int64_t begin = 0; begin < count; begin += kGroupInputs, record += Panel::kGroupBytes) {
    const auto group = Panel::Open(record);
    const auto inputs = static_cast<int>(Min(kGroupInputs, count - begin));
    int eight = 0;
    for (; eight * 8 + 8 <= inputs; ++eight) {
      TANDEM_UNROLL for (int i = 0; i < 8; ++i) widen(group, begin, eight, i);
    }
    for (int i = 0; eight * 8 + i < inputs; ++i) widen(group, begin, eight, i);
  }
}

// Packed panels that are widened to words.
template <typename Panel>
struct WidenedSource {
  using Blocks = CopiedBlocks<typename Panel::Words>;

  StraightSource<Panel, kTileRows> panels;

  template <int P>
  TANDEM_INLINE Ahead Fetch(int64_t panel, int64_t k) const {
    return panels.template Fetch<P>(panel, k);
  }
  template <int P>
  TANDEM_INLINE Block Read(int64_t panel, int64_t k, int64_t count, float* buffer) const {
    const char* from = panels.At(panel, k);
    if constexpr (Panel::kIsWords) return {from, panels.panel_bytes, count};
    for (int p = 0; p < P; ++p, from += panels.panel_bytes) {
      WidenInputs<Panel>(from, count, buffer + p * count * kPanel, kPanel);
    }
    return {reinterpret_cast<const char*>(buffer), count * kPanel * 4, count};
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

// A row-major matrix, from output `first` on, that is transposed.
template <typename Words>
struct DenseSource {
  using Blocks = CopiedBlocks<Words>;

  const float* w;
  int64_t in, first, end;

  template <int P>
  TANDEM_INLINE Ahead Fetch(int64_t panel, int64_t k) const {
    const auto* const at = reinterpret_cast<const char*>(w + (first + panel * kPanel) * in + k);
    return {at, P * kPanel, in * 4, kGroupInputs * 4, /*by_eights=*/false};
  }
  template <int P>
  TANDEM_INLINE Block Read(int64_t panel, int64_t k, int64_t count, float* buffer) const {
    for (int p = 0; p < P; ++p) {
      const int64_t o = first + (panel + p) * kPanel;
      float* const to = buffer + p * count * kPanel;
      ReadDense(w + o * in + k, in, end - o, count,
                [&](int64_t j, int v, Vec weights)
                    TANDEM_INLINE_LAMBDA { Store(to + j * kPanel + v * kWidth, weights); });
    }
    return {reinterpret_cast<const char*>(buffer), count * kPanel * 4, count};
  }
};

// Multiplies the rows [begin, end) by the P panels from `panel` on, of which the first output is
// `o`, in tiles of at most R rows.
template <int R, int P, typename Source>
TANDEM_NOINLINE void MultiplyBlocks(const LinearProduct& a, const Source& source, int64_t begin,
                                    int64_t end, int64_t panel, int64_t o) {
  using Blocks = typename Source::Blocks;
  constexpr int kColumns = P * kPanel;
  constexpr int64_t kMaxGroups = Blocks::template kInputs<P> / kGroupInputs;
  alignas(64) float buffer[Blocks::kCopies ? kMaxGroups * kGroupInputs * kColumns : 1];
  alignas(64) float sums[Blocks::kRows * kColumns];
  const int64_t rows = end - begin, tiles = (rows + R - 1) / R;
  // Equal blocks and tiles: a small block fetches little, and a small tile is slow.
  const int64_t groups = (a.in + kGroupInputs - 1) / kGroupInputs;
  const int64_t blocks = Max((groups + kMaxGroups - 1) / kMaxGroups, 1);
  const int64_t inputs = (groups + blocks - 1) / blocks * kGroupInputs;
  int64_t k = 0;
  do {
    const int64_t count = Min(inputs, a.in - k), next = k + inputs;
    const Block block = source.template Read<P>(panel, k, count, buffer);
    const Ahead ahead = next < a.in ? source.template Fetch<P>(panel, next)
                                    : source.template Fetch<P>(panel + P, 0);
    for (int64_t tile = 0; tile < tiles; ++tile) {
      const int64_t row = tile * rows / tiles;
      AddTile<typename Blocks::Format, R, P>(
          (tile + 1) * rows / tiles - row, a.x + (begin + row) * a.x_stride + k, a.x_stride, block,
          ahead.Part(tile, tiles), k == 0, sums + row * kColumns);
    }
    k = next;
  } while (k < a.in);
  for (int64_t r = 0; r < rows; ++r) Finish(a, begin + r, o, kColumns, sums + r * kColumns);
}

// Multiplies the rows [begin, end) by `panels` panels, of which the first output is `o`: P at a
// time, then P/2, and so on: one alone would wait for each of its sums.
template <int R, int P, typename Source>
void MultiplyPanels(const LinearProduct& a, const Source& source, int64_t begin, int64_t end,
                    int64_t panel, int64_t panels, int64_t o) {
  for (; panels >= P; panels -= P, panel += P, o += P * kPanel) {
    MultiplyBlocks<R, P>(a, source, begin, end, panel, o);
  }
  if constexpr (P > 1) MultiplyPanels<R, P / 2>(a, source, begin, end, panel, panels, o);
}

// Multiplies any rows by `panels` panels, of which the first output is `o`.
template <typename Source>
void MultiplyRows(const LinearProduct& a, const Source& source, int64_t panel, int64_t panels,
                  int64_t o) {
  const int64_t fit = Min(Max(kSecondLevelRowFloats / Max(a.in, 1), kMinBlockRows), kBlockRows);
  const int64_t blocks = (a.rows + fit - 1) / fit;
  for (int64_t i = 0; i < blocks; ++i) {
    MultiplyPanels<kTileRows, TilePanels(kTileRows)>(a, source, i * a.rows / blocks,
                                                     (i + 1) * a.rows / blocks, panel, panels, o);
  }
}

// The panels of a packed matrix by which rows are multiplied.
struct PackedPanels {
  const void* w;
  int64_t panel_begin, panel_end;
};

// Multiplies a few rows without a copy of the panels, in the tiles that suit their number.
template <typename Format, int R>
void MultiplyFewRows(const LinearProduct& a, const PackedPanels& args) {
  if constexpr (R > 1) {
    if (a.rows < R) return MultiplyFewRows<Format, R - 1>(a, args);
  }
  const StraightSource<Format, R> source = {static_cast<const char*>(args.w),
                                            Format::BytesOf(a.in)};
  MultiplyPanels<R, StraightPanels<Format>(R)>(a, source, 0, a.rows, args.panel_begin,
                                               args.panel_end - args.panel_begin,
                                               args.panel_begin * kPanel);
}

template <typename Format>
void MultiplyPacked(const PackedPanels& args, const LinearProduct& a) {
  if (a.rows <= Format::kStraightRows) return MultiplyFewRows<Format, Format::kRows>(a, args);
  const WidenedSource<Format> source = {{static_cast<const char*>(args.w), Format::BytesOf(a.in)}};
  MultiplyRows(a, source, args.panel_begin, args.panel_end - args.panel_begin,
               args.panel_begin * kPanel);
}

void PackedLinear(const PackedLinearArgs<float>& args) {
  const LinearProduct a = {args.x,    args.x_stride, args.bias, args.y,         args.y_stride,
                           args.rows, args.in,       args.out,  args.accumulate};
  const PackedPanels panels = {args.w, args.panel_begin, args.panel_end};
  switch (args.format) {
    case WeightFormat::kFloat32:
      return MultiplyPacked<Float32Format>(panels, a);
    case WeightFormat::kBfloat16:
      return MultiplyPacked<Bfloat16Format>(panels, a);
    case WeightFormat::kInt8:
      return MultiplyPacked<Int8Format>(panels, a);
    case WeightFormat::kInt4:
      return MultiplyPacked<Int4Format>(panels, a);
    case WeightFormat::kDense:
      return;  // not packed: a caller's error
  }
}

template <typename Format>
void UnpackPanels(const UnpackArgs& args) {
  const int64_t bytes = Format::BytesOf(args.in);
  float* to = args.to;
  for (int64_t panel = args.panel_begin; panel < args.panel_end; ++panel, to += kPanel) {
    WidenInputs<Format>(static_cast<const char*>(args.w) + panel * bytes, args.in, to,
                        args.to_stride);
  }
}

void Unpack(const UnpackArgs& args) {
  switch (args.format) {
    case WeightFormat::kFloat32:
      return UnpackPanels<Float32Format>(args);
    case WeightFormat::kBfloat16:
      return UnpackPanels<Bfloat16Format>(args);
    case WeightFormat::kInt8:
      return UnpackPanels<Int8Format>(args);
    case WeightFormat::kInt4:
      return UnpackPanels<Int4Format>(args);
    case WeightFormat::kDense:
      return;  // not packed: a caller's error
  }
}

// Multiplies R = a.rows rows by the outputs [o, end) of a row-major matrix, without a copy.
template <typename Words, int R>
void MultiplyFewDenseRows(const LinearProduct& a, const float* w, int64_t o) {
  if constexpr (R > 0) {
    if (a.rows < R) return MultiplyFewDenseRows<Words, R - 1>(a, w, o);
    for (; o < a.out; o += kPanel) {
      Vec sums[R][kVectors] = {};
      ReadDense(w + o * a.in, a.in, a.out - o, a.in,
                [&](int64_t k, int v, Vec weights) TANDEM_INLINE_LAMBDA {
                  TANDEM_UNROLL for (int r = 0; r < R; ++r) {
                    Words::MultiplyAdd(Words::Broadcast(a.x + r * a.x_stride + k), weights,
                                       sums[r][v]);
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

// Multiplies by the outputs [out_begin, a.out) of a row-major matrix.
template <typename Words>
TANDEM_NOINLINE void MultiplyDense(const LinearProduct& a, const float* w, int64_t out_begin) {
  constexpr int kFewDenseRows = 3;
  if (a.rows <= kFewDenseRows) return MultiplyFewDenseRows<Words, kFewDenseRows>(a, w, out_begin);
  const DenseSource<Words> source = {w, a.in, out_begin, a.out};
  const int64_t panels = (a.out - out_begin + kPanel - 1) / kPanel;
  MultiplyRows(a, source, 0, panels, out_begin);
}

void Linear(const LinearArgs<float>& args) {
  MultiplyDense<FloatWords>({args.x, args.x_stride, args.bias, args.y, args.y_stride, args.rows,
                             args.in, args.out_end, args.accumulate},
                            args.w, args.out_begin);
}

// While one lives, this thread's operations take numbers below 2^-126 for 0, as the instruction for
// pairs of bf16 does whatever the thread's settings. Operations must be in functions that are
// called meanwhile and not inlined.
class SubnormalsAreZero {
 public:
#ifdef __SSE__
  SubnormalsAreZero() : before_(__builtin_ia32_stmxcsr()) {
    constexpr unsigned int kInputs = 0x40, kResults = 0x8000;
    __builtin_ia32_ldmxcsr(before_ | kInputs | kResults);
  }
  ~SubnormalsAreZero() { __builtin_ia32_ldmxcsr(before_); }

 private:
  const unsigned int before_;
#endif
};

// Words of a row of bf16.
const float* PairsOf(const uint16_t* p) { return reinterpret_cast<const float*>(p); }

template <typename Args>
TANDEM_INLINE LinearProduct ProductOfPairs(const Args& args, int64_t out) {
  return {PairsOf(args.x), args.x_stride / 2, args.bias, args.y,         args.y_stride,
          args.rows,       (args.in + 1) / 2, out,       args.accumulate};
}

TANDEM_NOINLINE void MultiplyPackedPairs(const PackedPanels& panels, const LinearProduct& a) {
  MultiplyPacked<PairFormat>(panels, a);
}

void Bfloat16PackedLinear(const PackedLinearArgs<uint16_t>& args) {
  const SubnormalsAreZero as_the_instruction;
  MultiplyPackedPairs({args.w, args.panel_begin, args.panel_end}, ProductOfPairs(args, args.out));
}

void Bfloat16Linear(const LinearArgs<uint16_t>& args) {
  const SubnormalsAreZero as_the_instruction;
  MultiplyDense<PairWords>(ProductOfPairs(args, args.out_end), PairsOf(args.w), args.out_begin);
}

TANDEM_INLINE UIntVec RoundedBits(UIntVec bits) {
  const UIntVec rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  return (bits & 0x7fffffffu) > 0x7f800000u ? UIntVec{} + 0x7fc0u : rounded;
}

void RoundedRows(const RoundedRowsArgs& args) {
  for (int64_t r = 0; r < args.rows; ++r) {
    const float* const x = args.x + r * args.x_stride;
    uint16_t* const y = args.y + r * args.y_stride;
    int64_t i = 0;
    for (; i + kWidth <= args.width; i += kWidth) {
      const UIntVec bits = RoundedBits(*reinterpret_cast<const UIntVec*>(x + i));
#if TANDEM_SIMD_WIDTH == 16 && defined(__AVX512F__)
      // GCC 12 warns of the form without a mask.
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(y + i),
                          _mm512_maskz_cvtepi32_epi16(0xffff, reinterpret_cast<__m512i>(bits)));
#else
      *reinterpret_cast<UShortVec*>(y + i) = __builtin_convertvector(bits, UShortVec);
#endif
    }
    for (; i < args.width; ++i) {
      UIntVec bits = {};
      __builtin_memcpy(&bits, x + i, sizeof(float));
      y[i] = static_cast<uint16_t>(RoundedBits(bits)[0]);
    }
    if (args.width % 2 != 0) y[args.width] = 0;
  }
}

// Adds the entries that this file defines to a table.
constexpr CpuKernels WithLinear(CpuKernels kernels) {
  kernels.linear = Linear;
  kernels.packed_linear = PackedLinear;
  kernels.unpack = Unpack;
  kernels.bfloat16_linear = Bfloat16Linear;
  kernels.bfloat16_packed_linear = Bfloat16PackedLinear;
  kernels.rounded_rows = RoundedRows;
  return kernels;
}

}  // namespace
}  // namespace tandem::kernels
// NOLINTEND(misc-definitions-in-headers)
