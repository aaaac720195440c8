#include "common/tandem/tandem_sampler.h"

#include <algorithm>
#include <bit>
#include <cfloat>
#include <cmath>
#include <limits>

#include "absl/strings/str_cat.h"

namespace tandem {
namespace {

constexpr size_t kLanes = 8;
// Weights are summed in blocks, so that the inverse CDF looks inside one block only.
constexpr size_t kBlock = 512;
// Scaled logits below the maximum fall into buckets of 1/64 nat, over 32 nats.
constexpr int kBuckets = 2048;
constexpr float kBucketsPerNat = 64.0f;

// exp(x) for x <= 0 within 2 ulp; exactly 0 below -87, exactly 1 at 0. Plain arithmetic, so that
// the compiler vectorises it and every machine gives the same bits (Cephes expf's polynomial).
inline float ExpNonPositive(float x) {
  constexpr float kLog2E = 1.44269504088896341f;
  constexpr float kLn2High = 0.693359375f;
  constexpr float kLn2Low = -2.12194440e-4f;
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  // Range checks on integers: a float comparison would become a branch and stop the vectoriser.
  constexpr int32_t kLowest = std::bit_cast<int32_t>(87.0f);
  const int32_t magnitude = std::bit_cast<int32_t>(x) & 0x7FFFFFFF;
  const float clamped = -std::bit_cast<float>(magnitude < kLowest ? magnitude : kLowest);
  const float shifted = clamped * kLog2E + kRound;
  const float n = shifted - kRound;
  const float r = (clamped - n * kLn2High) - n * kLn2Low;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  const int32_t exponent = (std::bit_cast<int32_t>(shifted) - std::bit_cast<int32_t>(kRound)) << 23;
  const float result = std::bit_cast<float>(std::bit_cast<int32_t>(p) + exponent);
  const int32_t in_range = (magnitude - kLowest - 1) >> 31;
  return std::bit_cast<float>(std::bit_cast<int32_t>(result) & in_range);
}

double SumInOrder(const float* values, size_t count) {
  double lanes[kLanes] = {};
  size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (size_t j = 0; j < kLanes; ++j) lanes[j] += values[i + j];
  }
  for (; i < count; ++i) lanes[0] += values[i];
  return ((lanes[0] + lanes[4]) + (lanes[1] + lanes[5])) +
         ((lanes[2] + lanes[6]) + (lanes[3] + lanes[7]));
}

// The largest value; NaN or +inf anywhere gives +inf.
float MaxOrInf(std::span<const float> values) {
  // Order-preserving map of float32 to int32, with everything above FLT_MAX (NaN of either sign
  // too) on +inf; integers again for the vectoriser.
  constexpr int32_t kInf = std::bit_cast<int32_t>(std::numeric_limits<float>::infinity());
  int32_t largest = std::numeric_limits<int32_t>::min();
  for (const float value : values) {
    const int32_t bits = std::bit_cast<int32_t>(value);
    const int32_t magnitude = bits & 0x7FFFFFFF;
    const int32_t ordered = magnitude > kInf ? kInf : bits < 0 ? -magnitude : magnitude;
    largest = ordered > largest ? ordered : largest;
  }
  return largest < 0 ? -std::bit_cast<float>(-largest) : std::bit_cast<float>(largest);
}

inline int Bucket(float scaled) {
  const float place = -scaled * kBucketsPerNat;
  return place < kBuckets - 1 ? static_cast<int>(place) : kBuckets - 1;
}

}  // namespace

absl::Status TandemSampler::Prepare(std::span<const float> logits, double temperature) {
  const float divisor = temperature == 0.0 ? 1.0f : static_cast<float>(temperature);
  const float largest = MaxOrInf(logits);
  if (!(std::fabs(largest) <= FLT_MAX)) {
    return absl::InternalError(
        "the model gave a row of logits with NaN or infinity: its weights are probably broken");
  }
  const size_t size = logits.size();
  scaled_.resize(size);
  weights_.resize(size);
  block_sums_.resize((size + kBlock - 1) / kBlock);
  float* const scaled = scaled_.data();
  float* const weights = weights_.data();
  for (size_t i = 0; i < size; ++i) {
    scaled[i] = (logits[i] - largest) / divisor;
    weights[i] = ExpNonPositive(scaled[i]);
  }
  argmax_ = static_cast<int32_t>(std::find(logits.begin(), logits.end(), largest) - logits.begin());
  total_ = 0.0;
  for (size_t b = 0; b < block_sums_.size(); ++b) {
    total_ += SumBlock(b);
  }
  return absl::OkStatus();
}

double TandemSampler::SumBlock(size_t b) {
  const size_t begin = b * kBlock;
  block_sums_[b] = SumInOrder(weights_.data() + begin, std::min(kBlock, weights_.size() - begin));
  return block_sums_[b];
}

TandemSampler::Border TandemSampler::FindBorder(Border within, int64_t count, double mass) {
  const auto in_range = [&](float scaled, int32_t id) {
    return scaled > within.scaled || (scaled == within.scaled && id <= within.id);
  };
  const bool by_count = count > 0;
  const double goal = by_count ? static_cast<double>(count) : mass;
  // A histogram finds the bucket in which the goal is reached; only that bucket is sorted.
  histogram_.assign(kBuckets, 0.0);
  const int32_t size = static_cast<int32_t>(scaled_.size());
  for (int32_t id = 0; id < size; ++id) {
    if (in_range(scaled_[id], id)) {
      histogram_[Bucket(scaled_[id])] += by_count ? 1.0 : weights_[id];
    }
  }
  int bucket = 0;
  double before = 0.0;
  while (bucket < kBuckets && before + histogram_[bucket] < goal) before += histogram_[bucket++];
  if (bucket == kBuckets) return within;
  candidates_.clear();
  for (int32_t id = 0; id < size; ++id) {
    if (Bucket(scaled_[id]) == bucket && in_range(scaled_[id], id)) {
      candidates_.push_back({scaled_[id], id});
    }
  }
  std::sort(candidates_.begin(), candidates_.end(), [](const Border& a, const Border& b) {
    return a.scaled != b.scaled ? a.scaled > b.scaled : a.id < b.id;
  });
  for (const Border& candidate : candidates_) {
    before += by_count ? 1.0 : weights_[candidate.id];
    if (before >= goal) return candidate;
  }
  // Rounding: the sorted sum fell short of the histogram's. The whole bucket stays.
  return candidates_.back();
}

double TandemSampler::Cut(Border border) {
  const size_t size = weights_.size();
  double kept = 0.0;
  for (size_t b = 0; b < block_sums_.size(); ++b) {
    const size_t begin = b * kBlock;
    const size_t end = std::min(begin + kBlock, size);
    for (size_t i = begin; i < end; ++i) {
      const bool keep = scaled_[i] > border.scaled ||
                        (scaled_[i] == border.scaled && static_cast<int32_t>(i) <= border.id);
      weights_[i] = keep ? weights_[i] : 0.0f;
    }
    kept += SumBlock(b);
  }
  return kept;
}

// The first token whose cumulative weight exceeds `target`; the last token with weight if rounding
// keeps the sum below it.
int32_t TandemSampler::Invert(double target) const {
  double before = 0.0;
  double sum = 0.0;
  size_t chosen = block_sums_.size();
  for (size_t b = 0; b < block_sums_.size(); ++b) {
    if (block_sums_[b] <= 0.0) continue;
    chosen = b;
    before = sum;
    sum += block_sums_[b];
    if (sum > target) break;
  }
  if (chosen == block_sums_.size()) return argmax_;
  const size_t begin = chosen * kBlock;
  const size_t end = std::min(begin + kBlock, weights_.size());
  size_t last = begin;
  for (size_t i = begin; i < end; ++i) {
    if (weights_[i] <= 0.0f) continue;
    last = i;
    before += weights_[i];
    if (before > target) break;
  }
  return static_cast<int32_t>(last);
}

int32_t TandemSampler::AcceptOrReplace(const DraftProposal& proposal, double kept) {
  const std::span<const float> q = proposal.distribution;
  const auto draft = static_cast<size_t>(proposal.token);
  const double of_draft = q.empty() ? kept : q[draft] * kept;
  if (proposal.accept_u * of_draft < weights_[draft]) return proposal.token;
  if (!q.empty()) {
    for (size_t i = 0; i < weights_.size(); ++i) {
      weights_[i] = static_cast<float>(std::max(0.0, weights_[i] - q[i] * kept));
    }
  }
  weights_[draft] = 0.0f;
  double residual = 0.0;
  for (size_t b = 0; b < block_sums_.size(); ++b) residual += SumBlock(b);
  // Nothing is left where p and q are equal but for their rounding: then p / q is 1.
  return residual > 0.0 ? Invert(proposal.residual_u * residual) : proposal.token;
}

absl::StatusOr<SampledToken> TandemSampler::Sample(std::span<const float> logits,
                                                   const SamplingParams& params, double u,
                                                   const DraftProposal& proposal,
                                                   std::vector<float>* distribution) {
  const bool has_draft = proposal.token != DraftProposal::kNone;
  if (has_draft && (proposal.token < 0 || static_cast<size_t>(proposal.token) >= logits.size() ||
                    (!proposal.distribution.empty() &&
                     proposal.distribution.size() != logits.size()))) {
    return absl::InvalidArgumentError(absl::StrCat(
        "a draft of token id ", proposal.token, " with a distribution of ",
        proposal.distribution.size(), " does not fit a row of ", logits.size(), " logits"));
  }
  if (absl::Status status = Prepare(logits, params.temperature); !status.ok()) return status;
  const double total = total_;
  SampledToken result;
  if (params.temperature == 0.0) {
    result.token = argmax_;
  } else {
    constexpr float kLowest = -std::numeric_limits<float>::infinity();
    const Border everything = {kLowest, std::numeric_limits<int32_t>::max()};
    Border border = everything;
    double kept = total;
    if (params.top_k > 0 && static_cast<size_t>(params.top_k) < logits.size()) {
      border = FindBorder(border, params.top_k, 0.0);
      kept = Cut(border);
    }
    if (params.top_p < 1.0) {
      border = FindBorder(border, 0, params.top_p * kept);
      kept = Cut(border);
    }
    if (params.min_p > 0.0) {
      const Border floor = {static_cast<float>(std::log(params.min_p)),
                            std::numeric_limits<int32_t>::max()};
      if (floor.scaled > border.scaled) {
        border = floor;
        kept = Cut(border);
      }
    }
    if (distribution != nullptr) {
      distribution->resize(weights_.size());
      for (size_t i = 0; i < weights_.size(); ++i) {
        (*distribution)[i] = static_cast<float>(weights_[i] / kept);
      }
    }
    result.token = has_draft ? AcceptOrReplace(proposal, kept) : Invert(u * kept);
    // Equal sums mean that nothing with weight was cut.
    result.log_keep_mass = kept == total ? 0.0f : static_cast<float>(std::log(kept / total));
  }
  result.logprob = static_cast<float>(scaled_[result.token] - std::log(total));
  return result;
}

absl::StatusOr<float> TandemSampler::TokenLogProb(std::span<const float> logits, double temperature,
                                                  int32_t token) {
  if (token < 0 || static_cast<size_t>(token) >= logits.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("token id ", token, " is outside the row of ", logits.size(), " logits"));
  }
  if (absl::Status status = Prepare(logits, temperature); !status.ok()) return status;
  return static_cast<float>(scaled_[token] - std::log(total_));
}

}  // namespace tandem
