#include "common/coauthoring/tandem_sampler.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "common/base/errors/status_macros.h"
#include "common/kernels/cpu/cpu_kernels.h"
#include "common/kernels/cpu/instruction_sets.h"

namespace tandem {
namespace {

constexpr size_t kLanes = 8;
// Weights are summed in blocks, so that the inverse CDF looks inside one block only.
constexpr size_t kBlock = kernels::kLogitBlock;
// Scaled logits below the maximum fall into buckets of 1/64 nat, over 32 nats.
constexpr int kBuckets = 2048;
constexpr float kBucketsPerNat = 64.0f;

// exp(x) for x <= 0 within 2 ulp; exactly 0 below kLowest, exactly 1 at 0. Plain arithmetic, so
// that the compiler vectorises it (Cephes expf's polynomial).
constexpr float kLowest = -87.0f;
inline float ExpNonPositive(float x) {
  constexpr float kLog2E = 1.44269504088896341f;
  constexpr float kLn2High = 0.693359375f;
  constexpr float kLn2Low = -2.12194440e-4f;
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  // Range checks on integers: a float comparison would become a branch and stop the vectoriser.
  constexpr int32_t kLargest = std::bit_cast<int32_t>(-kLowest);
  const int32_t magnitude = std::bit_cast<int32_t>(x) & 0x7FFFFFFF;
  const float clamped = -std::bit_cast<float>(magnitude < kLargest ? magnitude : kLargest);
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
  const int32_t in_range = (magnitude - kLargest - 1) >> 31;
  return std::bit_cast<float>(std::bit_cast<int32_t>(result) & in_range);
}

double SumInOrder(std::span<const float> values) {
  const size_t count = values.size();
  double lanes[kLanes] = {};
  size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (size_t j = 0; j < kLanes; ++j) lanes[j] += values[i + j];
  }
  for (; i < count; ++i) lanes[0] += values[i];
  return ((lanes[0] + lanes[4]) + (lanes[1] + lanes[5])) +
         ((lanes[2] + lanes[6]) + (lanes[3] + lanes[7]));
}

// A token that cannot be drawn.
constexpr float kNever = -std::numeric_limits<float>::infinity();

std::span<const float> BlockOf(std::span<const float> row, size_t block) {
  const size_t begin = block * kBlock;
  return row.subspan(begin, std::min(kBlock, row.size() - begin));
}

// ATen has no such kernel.
auto LogitStatistics() {
  const auto own = kernels::GetCpuKernels().logit_statistics;
  return own != nullptr ? own : kernels::kPortableKernels.logit_statistics;
}

absl::Status CheckProposal(const DraftProposal& draft, size_t vocabulary) {
  const bool known = draft.token >= 0 && static_cast<size_t>(draft.token) < vocabulary;
  const size_t size = draft.distribution.size();
  if (known && (size == 0 || size == vocabulary)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("a draft of token id ", draft.token,
                                                 " with a distribution over ", size,
                                                 " tokens does not fit ", vocabulary, " logits"));
}

inline int Bucket(float scaled) {
  const float place = -scaled * kBucketsPerNat;
  return place < kBuckets - 1 ? static_cast<int>(place) : kBuckets - 1;
}

}  // namespace

absl::Status TandemSampler::BrokenLogits() {
  return absl::InternalError(
      "the model computed logits with NaN or infinity: its weights are probably broken");
}

absl::Status TandemSampler::Prepare(std::span<const float> logits, double temperature) {
  scale_ = temperature == 0.0 ? 1.0f : 1.0f / static_cast<float>(temperature);
  const size_t size = logits.size(), blocks = (size + kBlock - 1) / kBlock;
  block_max_.resize(blocks);
  block_sum_.resize(blocks);
  block_weighted_.resize(blocks);
  const auto statistics = LogitStatistics();
  for (size_t b = 0; b < blocks; ++b) {
    const std::span<const float> block = BlockOf(logits, b);
    statistics({block.data(), &scale_, 1, static_cast<int64_t>(block.size()), &block_max_[b],
                &block_sum_[b], &block_weighted_[b]});
    if (block_max_[b] == kNever) {  // then the sum is NaN
      if (!std::ranges::all_of(block, [](float x) { return x == kNever; })) return BrokenLogits();
      block_sum_[b] = 0.0f;
    }
  }
  row_ = kernels::MergeBlocks(block_max_.data(), block_sum_.data(), block_weighted_.data(),
                              static_cast<int64_t>(blocks), 1);
  if (!std::isfinite(row_.max) || !std::isfinite(row_.sum)) return BrokenLogits();
  return absl::OkStatus();
}

// The lowest id among the largest logits.
int32_t TandemSampler::Largest(std::span<const float> logits) const {
  const size_t b = std::ranges::find(block_max_, row_.max) - block_max_.begin();
  const std::span<const float> block = BlockOf(logits, b);
  const auto found =
      std::ranges::find_if(block, [&](float logit) { return Scaled(logit) == row_.max; });
  return static_cast<int32_t>(b * kBlock + (found - block.begin()));
}

double TandemSampler::FillRow(std::span<const float> logits) {
  const size_t size = logits.size();
  const auto max = static_cast<float>(row_.max);
  scaled_.resize(size);
  weights_.resize(size);
  block_sums_.resize(block_max_.size());
  float* const scaled = scaled_.data();
  float* const weights = weights_.data();
  for (size_t i = 0; i < size; ++i) {
    scaled[i] = Scaled(logits[i]) - max;
    weights[i] = ExpNonPositive(scaled[i]);
  }
  return SumWeights();
}

double TandemSampler::SumWeights() {
  double total = 0.0;
  for (size_t b = 0; b < block_sums_.size(); ++b) {
    block_sums_[b] = SumInOrder(BlockOf(weights_, b));
    total += block_sums_[b];
  }
  return total;
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
  for (size_t i = 0; i < weights_.size(); ++i) {
    const bool keep = scaled_[i] > border.scaled ||
                      (scaled_[i] == border.scaled && static_cast<int32_t>(i) <= border.id);
    weights_[i] = keep ? weights_[i] : 0.0f;
  }
  return SumWeights();
}

template <typename Weigh>
int32_t TandemSampler::Invert(double target, const Weigh& weigh) {
  double before = 0.0;
  double sum = 0.0;
  size_t chosen = 0;
  for (size_t b = 0; b < block_sums_.size(); ++b) {
    if (block_sums_[b] <= 0.0) continue;
    chosen = b;
    before = sum;
    sum += block_sums_[b];
    if (sum > target) break;
  }
  const size_t begin = chosen * kBlock;
  const size_t end = std::min(begin + kBlock, weights_.size());
  weigh(begin, end);
  size_t last = begin;
  for (size_t i = begin; i < end; ++i) {
    if (weights_[i] <= 0.0f) continue;
    last = i;
    before += weights_[i];
    if (before > target) break;
  }
  return static_cast<int32_t>(last);
}

int32_t TandemSampler::InvertRow(double target) {
  return Invert(target, [](size_t, size_t) {});
}

int32_t TandemSampler::DrawUncut(std::span<const float> logits, double u) {
  const auto max = static_cast<float>(row_.max);
  weights_.resize(logits.size());
  block_sums_.resize(block_max_.size());
  for (size_t b = 0; b < block_sums_.size(); ++b) {
    const float below = block_max_[b] - max;
    // No token of a block below that has a weight.
    block_sums_[b] = below < kLowest ? 0.0 : std::exp(double{below}) * block_sum_[b];
  }
  return Invert(u * row_.sum, [&](size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) {
      weights_[i] = ExpNonPositive(Scaled(logits[i]) - max);
    }
  });
}

double TandemSampler::FillCutRow(std::span<const float> logits, const SamplingParams& params,
                                 float& log_keep_mass) {
  const double total = FillRow(logits);
  Border border = {kNever, std::numeric_limits<int32_t>::max()};  // everything
  double kept = total;
  if (CutsByCount(params, static_cast<int64_t>(logits.size()))) {
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
  // Equal sums mean that nothing with weight was cut.
  log_keep_mass = kept == total ? 0.0f : static_cast<float>(std::log(kept / total));
  return kept;
}

int32_t TandemSampler::AcceptOrReplace(const DraftProposal& draft, double kept) {
  const std::span<const float> q = draft.distribution;
  const auto id = static_cast<size_t>(draft.token);
  const double q_of_draft = q.empty() ? 1.0 : q[id];
  if (draft.accept_u * q_of_draft * kept < weights_[id]) return draft.token;
  for (size_t i = 0; i < q.size(); ++i) {
    weights_[i] = static_cast<float>(std::max(0.0, weights_[i] - q[i] * kept));
  }
  weights_[id] = 0.0f;
  const double residual = SumWeights();
  // Rounding alone rejects a draft where p and q are equal; nothing is left then.
  return residual > 0.0 ? InvertRow(draft.residual_u * residual) : draft.token;
}

absl::StatusOr<SampledToken> TandemSampler::Sample(std::span<const float> logits,
                                                   const SamplingParams& params, double u,
                                                   const DraftProposal& draft,
                                                   std::vector<float>* distribution) {
  if (draft.token != DraftProposal::kNone) {
    TANDEM_RETURN_IF_ERROR(CheckProposal(draft, logits.size()));
  }
  TANDEM_RETURN_IF_ERROR(Prepare(logits, params.temperature));
  const bool cuts = Cuts(params, static_cast<int64_t>(logits.size()));
  SampledToken result;
  if (params.temperature == 0.0) {
    result.token = Largest(logits);
  } else if (!cuts && draft.token == DraftProposal::kNone && distribution == nullptr) {
    result.token = DrawUncut(logits, u);
  } else {
    const double kept = FillCutRow(logits, params, result.log_keep_mass);
    if (distribution != nullptr) {
      distribution->resize(weights_.size());
      std::ranges::transform(weights_, distribution->begin(),
                             [kept](float weight) { return static_cast<float>(weight / kept); });
    }
    result.token =
        draft.token == DraftProposal::kNone ? InvertRow(u * kept) : AcceptOrReplace(draft, kept);
  }
  result.logprob = LogProb(logits[result.token]);
  return result;
}

absl::StatusOr<float> TandemSampler::TokenLogProb(std::span<const float> logits, double temperature,
                                                  int32_t token) {
  if (token < 0 || static_cast<size_t>(token) >= logits.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("token id ", token, " is outside the row of ", logits.size(), " logits"));
  }
  if (absl::Status status = Prepare(logits, temperature); !status.ok()) return status;
  return LogProb(logits[token]);
}

std::vector<LikelyToken> TandemSampler::Top(std::span<const float> logits, size_t count) {
  ids_.resize(logits.size());
  std::iota(ids_.begin(), ids_.end(), 0);
  const auto middle = ids_.begin() + static_cast<int64_t>(std::min(count, ids_.size()));
  std::partial_sort(ids_.begin(), middle, ids_.end(), [&](int32_t a, int32_t b) {
    return logits[a] > logits[b] || (logits[a] == logits[b] && a < b);
  });
  std::vector<LikelyToken> top;
  for (auto id = ids_.begin(); id != middle; ++id) top.push_back({*id, LogProb(logits[*id])});
  return top;
}

float TandemSampler::LogProb(float logit) const {
  return static_cast<float>(kernels::LogProb(Scaled(logit), given_row_.value_or(row_)));
}

}  // namespace tandem
