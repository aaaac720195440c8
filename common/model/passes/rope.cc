#include "common/model/passes/rope.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace tandem {
namespace {

constexpr double kTwoPi = 2 * std::numbers::pi;

// Llama 3.1: wavelengths longer than original / low_freq_factor are divided by `factor`, shorter
// than original / high_freq_factor kept, those between interpolated.
void StretchLlama3(const RopeConfig& rope, std::vector<float>& inverse) {
  const double original = rope.original_max_position_embeddings;
  for (float& frequency : inverse) {
    const double wavelength = kTwoPi / frequency;
    if (wavelength < original / rope.high_freq_factor) continue;
    if (wavelength > original / rope.low_freq_factor) {
      frequency = static_cast<float>(frequency / rope.factor);
      continue;
    }
    const double smooth = (original / wavelength - rope.low_freq_factor) /
                          (rope.high_freq_factor - rope.low_freq_factor);
    frequency = static_cast<float>((1 - smooth) * frequency / rope.factor + smooth * frequency);
  }
}

double YarnScale(double factor, double mscale) {
  return factor <= 1 ? 1.0 : 0.1 * mscale * std::log(factor) + 1.0;
}

// YaRN, sections 3.2 to 3.4: dimensions that turn often keep their frequency, slow ones are
// interpolated, with a linear ramp between.
void StretchYarn(const RopeConfig& rope, int64_t head_dim, std::vector<float>& inverse) {
  const double dim = static_cast<double>(head_dim);
  const auto dimension_of = [&](double rotations) {
    return dim * std::log(rope.original_max_position_embeddings / (rotations * kTwoPi)) /
           (2 * std::log(rope.theta));
  };
  double low = dimension_of(rope.beta_fast), high = dimension_of(rope.beta_slow);
  if (rope.truncate) {
    low = std::floor(low);
    high = std::ceil(high);
  }
  low = std::max(low, 0.0);
  high = std::min(high, dim - 1);
  if (low == high) high += 0.001;
  for (size_t i = 0; i < inverse.size(); ++i) {
    const double ramp = std::clamp((static_cast<double>(i) - low) / (high - low), 0.0, 1.0);
    inverse[i] = static_cast<float>(inverse[i] / rope.factor * ramp + inverse[i] * (1 - ramp));
  }
}

// LongRoPE, as `transformers` scales cosines and sines for it.
double LongRopeScale(const RopeConfig& rope) {
  if (rope.factor <= 1) return 1.0;
  return std::sqrt(1 + std::log(rope.factor) / std::log(rope.original_max_position_embeddings));
}

}  // namespace

RopeFrequencies ComputeRopeFrequencies(const RopeConfig& rope, int64_t dim) {
  RopeFrequencies result{{}, 1.0};
  for (int64_t d = 0; d < dim; d += 2) {
    // fp32 where `transformers` has fp32, for the same rounding.
    const float exponent = static_cast<float>(d) / static_cast<float>(dim);
    const float power = static_cast<float>(std::pow(rope.theta, static_cast<double>(exponent)));
    result.inverse.push_back(1.0f / power);
  }
  switch (rope.type) {
    case RopeConfig::Type::kDefault:
      break;
    case RopeConfig::Type::kLinear:
      for (float& frequency : result.inverse) frequency /= static_cast<float>(rope.factor);
      break;
    case RopeConfig::Type::kLlama3:
      StretchLlama3(rope, result.inverse);
      break;
    case RopeConfig::Type::kYarn:
      StretchYarn(rope, dim, result.inverse);
      if (rope.attention_factor.has_value()) {
        result.attention_scaling = *rope.attention_factor;
      } else if (rope.mscale.has_value() && rope.mscale_all_dim.has_value()) {
        result.attention_scaling =
            YarnScale(rope.factor, *rope.mscale) / YarnScale(rope.factor, *rope.mscale_all_dim);
      } else {
        result.attention_scaling = YarnScale(rope.factor, 1.0);
      }
      break;
    case RopeConfig::Type::kLongRope:
      for (size_t i = 0; i < result.inverse.size(); ++i) {
        result.inverse[i] /= static_cast<float>(rope.frequency_divisors[i]);
      }
      result.attention_scaling = rope.attention_factor.value_or(LongRopeScale(rope));
      break;
  }
  return result;
}

double YarnScoreFactor(const RopeConfig& rope) {
  if (rope.type != RopeConfig::Type::kYarn || !rope.mscale_all_dim.has_value()) return 1.0;
  const double scale = YarnScale(rope.factor, *rope.mscale_all_dim);
  return scale * scale;
}

}  // namespace tandem
