#include "common/kernels/cpu/packed_weight.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

namespace tandem::kernels {
namespace {

constexpr uint16_t kBfloat16Nan = 0x7fc0;
constexpr float kMaxQuantised = 0x1p110f;  // of a magnitude

// Rounds to the nearest bfloat16, ties to even.
uint16_t ToBfloat16(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  const auto rounded = static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
  return std::isnan(value) ? kBfloat16Nan : rounded;
}

float FromBfloat16(uint16_t value) { return std::bit_cast<float>(uint32_t{value} << 16); }

// Returns the place of input k of an output in a panel of kBfloat16.
constexpr int64_t Bfloat16Offset(int64_t k, int64_t lane) {
  return 4 * (k / 2 * kPanelOuts + lane) + 2 * (k % 2);
}

// The numbers of one group of one output, with their scale.
struct Group {
  uint16_t scale = 0;
  int8_t q[kGroupInputs] = {};
};

// Quantises `count` weights of a group; the rest of it are zeros.
Group Quantise(const float* values, int64_t count, WeightFormat format) {
  Group group;
  // The bits of magnitudes have the order of their values, and NaN comes last.
  uint32_t largest = 0;
  for (int64_t k = 0; k < count; ++k) {
    largest = std::max(largest, std::bit_cast<uint32_t>(std::abs(values[k])));
  }
  if (largest > std::bit_cast<uint32_t>(kMaxQuantised)) {
    group.scale = kBfloat16Nan;
    return group;
  }
  float extreme = 0;  // the first of the largest magnitude
  for (int64_t k = count; k-- > 0;) {
    if (std::bit_cast<uint32_t>(std::abs(values[k])) == largest) extreme = values[k];
  }
  const bool bytes = format == WeightFormat::kInt8;
  group.scale = ToBfloat16(bytes ? std::abs(extreme) / 127 : extreme / -8);
  const float scale = FromBfloat16(group.scale);
  if (scale == 0) return group;
  const float lowest = bytes ? -127 : -8, highest = bytes ? 127 : 7;
  constexpr float kRounder = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  for (int64_t k = 0; k < count; ++k) {
    const float q = std::clamp(values[k] / scale, lowest, highest);
    group.q[k] = static_cast<int8_t>((q + kRounder) - kRounder);
  }
  return group;
}

// The bytes of a group of a panel.
constexpr int64_t GroupBytes(WeightFormat format) { return PanelBytes(format, kGroupInputs); }
constexpr int64_t kScaleBytes = 2 * kPanelOuts;

// Integers of a unit of 16 bits, and the bits of each.
constexpr int64_t PerUnit(WeightFormat format) { return format == WeightFormat::kInt8 ? 2 : 4; }
constexpr int64_t Bits(WeightFormat format) { return 16 / PerUnit(format); }

// Returns the place of the integers of input k, from the start of a group on.
constexpr int64_t UnitOffset(WeightFormat format, int64_t k, int64_t lane) {
  return kScaleBytes + 2 * (k / PerUnit(format) * kPanelOuts + UnitOfLane(lane));
}

void PackGroup(WeightFormat format, const Group& group, uint8_t* record, int64_t lane) {
  std::memcpy(record + 2 * UnitOfLane(lane), &group.scale, 2);
  const int64_t count = PerUnit(format), bits = Bits(format);
  for (int64_t k = 0; k < kGroupInputs; k += count) {
    uint16_t unit = 0;
    for (int64_t i = 0; i < count; ++i) {
      const int u = group.q[k + i] + (1 << (bits - 1));
      unit = static_cast<uint16_t>(unit | u << (bits * i));
    }
    std::memcpy(record + UnitOffset(format, k, lane), &unit, 2);
  }
}

Group UnpackGroup(WeightFormat format, const uint8_t* record, int64_t lane) {
  Group group;
  std::memcpy(&group.scale, record + 2 * UnitOfLane(lane), 2);
  const int64_t count = PerUnit(format), bits = Bits(format);
  for (int64_t k = 0; k < kGroupInputs; ++k) {
    uint16_t unit = 0;
    std::memcpy(&unit, record + UnitOffset(format, k, lane), 2);
    const int u = unit >> (bits * (k % count)) & ((1 << bits) - 1);
    group.q[k] = static_cast<int8_t>(u - (1 << (bits - 1)));
  }
  return group;
}

// Returns the bfloat16 number of a value of that type.
uint16_t ToBfloat16(uint16_t value) { return value; }

// Word `k` of a row of a panel of kFloat32, and of kBfloat16.
uint32_t FloatWord(const float* row, int64_t k) { return std::bit_cast<uint32_t>(row[k]); }
template <typename Number>
uint32_t Bfloat16Word(const Number* row, int64_t k) {
  return ToBfloat16(row[2 * k]) | static_cast<uint32_t>(ToBfloat16(row[2 * k + 1])) << 16;
}

// Writes `count` words of each of `lanes` rows, those of one row kPanelOuts words apart, from `to`
// on. Few words of every row come at a time, so that the cache lines they share are written at
// once.
template <typename Number, typename Word>
void PackWords(const Number* values, int64_t stride, int64_t lanes, int64_t count, const Word& word,
               uint32_t* to) {
  constexpr int64_t kWords = 32;
  uint32_t words[kPanelOuts][kWords];
  for (int64_t begin = 0; begin < count; begin += kWords) {
    const int64_t some = std::min(kWords, count - begin);
    for (int64_t i = 0; i < lanes; ++i) {
      for (int64_t k = 0; k < some; ++k) words[i][k] = word(values + i * stride, begin + k);
    }
    for (int64_t k = 0; k < some; ++k) {
      for (int64_t i = 0; i < lanes; ++i) to[(begin + k) * kPanelOuts + i] = words[i][k];
    }
  }
}

// The same for the rows of a panel of kBfloat16 with `in` inputs; the last word may have one of
// them.
template <typename Number>
void PackBfloat16(const Number* values, int64_t stride, int64_t lanes, int64_t in, uint32_t* to) {
  PackWords(values, stride, lanes, in / 2, Bfloat16Word<Number>, to);
  if (in % 2 == 0) return;
  for (int64_t i = 0; i < lanes; ++i) {
    to[in / 2 * kPanelOuts + i] = ToBfloat16(values[i * stride + in - 1]);
  }
}

// Packs the rows of a panel of integers, whose first is its row `lane`.
void PackIntegers(const float* values, int64_t stride, int64_t lanes, const PackedMatrix& to,
                  uint8_t* panel, int64_t lane) {
  for (int64_t i = 0; i < lanes; ++i) {
    for (int64_t k = 0; k < to.in; k += kGroupInputs) {
      const int64_t count = std::min(kGroupInputs, to.in - k);
      PackGroup(to.format, Quantise(values + i * stride + k, count, to.format),
                panel + k / kGroupInputs * GroupBytes(to.format), lane + i);
    }
  }
}

// Divides the rows [first, first + rows) among panels: pack(row, lanes, panel, lane) for `lanes`
// rows from first + row on, which are those of the panel from `lane` on.
template <typename Pack>
void ForEachPanel(const PackedMatrix& to, int64_t first, int64_t rows, const Pack& pack) {
  const int64_t panel_bytes = PanelBytes(to.format, to.in), end = first + rows;
  for (int64_t row = first; row < end;) {
    const int64_t lane = row % kPanelOuts, lanes = std::min(kPanelOuts - lane, end - row);
    pack(row - first, lanes, static_cast<uint8_t*>(to.data) + row / kPanelOuts * panel_bytes, lane);
    row += lanes;
  }
}

}  // namespace

void PackRows(const PackedMatrix& to, int64_t first, int64_t rows, const float* values,
              int64_t stride) {
  ForEachPanel(to, first, rows, [&](int64_t row, int64_t lanes, uint8_t* panel, int64_t lane) {
    const float* const some = values + row * stride;
    auto* const words = reinterpret_cast<uint32_t*>(panel) + lane;
    if (to.format == WeightFormat::kFloat32) {
      PackWords(some, stride, lanes, to.in, FloatWord, words);
    } else if (to.format == WeightFormat::kBfloat16) {
      PackBfloat16(some, stride, lanes, to.in, words);
    } else {
      PackIntegers(some, stride, lanes, to, panel, lane);
    }
  });
}

void PackBfloat16Rows(const PackedMatrix& to, int64_t first, int64_t rows, const uint16_t* values,
                      int64_t stride) {
  ForEachPanel(to, first, rows, [&](int64_t row, int64_t lanes, uint8_t* panel, int64_t lane) {
    PackBfloat16(values + row * stride, stride, lanes, to.in,
                 reinterpret_cast<uint32_t*>(panel) + lane);
  });
}

void RoundToBfloat16(const float* from, int64_t count, float* to) {
  for (int64_t i = 0; i < count; ++i) to[i] = FromBfloat16(ToBfloat16(from[i]));
}

void UnpackRow(const PackedMatrix& from, int64_t row, float* values) {
  const auto* const panel =
      static_cast<const uint8_t*>(from.data) + row / kPanelOuts * PanelBytes(from.format, from.in);
  const int64_t lane = row % kPanelOuts;
  if (from.format == WeightFormat::kFloat32) {
    const auto* const lanes = reinterpret_cast<const float*>(panel) + lane;
    for (int64_t k = 0; k < from.in; ++k) values[k] = lanes[k * kPanelOuts];
  } else if (from.format == WeightFormat::kBfloat16) {
    for (int64_t k = 0; k < from.in; ++k) {
      uint16_t value = 0;
      std::memcpy(&value, panel + Bfloat16Offset(k, lane), 2);
      values[k] = FromBfloat16(value);
    }
  } else {
    for (int64_t k = 0; k < from.in; k += kGroupInputs) {
      const Group group =
          UnpackGroup(from.format, panel + k / kGroupInputs * GroupBytes(from.format), lane);
      const float scale = FromBfloat16(group.scale);
      const int64_t count = std::min(kGroupInputs, from.in - k);
      // Adding 0 turns -0 into 0, which is what the kernels have for q = 0.
      for (int64_t i = 0; i < count; ++i) {
        values[k + i] = static_cast<float>(group.q[i]) * scale + 0.0f;
      }
    }
  }
}

}  // namespace tandem::kernels
