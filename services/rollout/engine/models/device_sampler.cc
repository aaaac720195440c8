#include "services/rollout/engine/models/device_sampler.h"

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <vector>

#include "common/kernels/logit_blocks.h"
#include "common/ops/logit_statistics.h"
#include "common/tensor/aten/device_copies.h"

namespace tandem::rollout {
namespace {

constexpr int64_t kBlock = kernels::kLogitBlock;
// Stands for the number in [0, 1) that chooses a token, where the largest logit is chosen.
constexpr double kGreedy = -1;

// The places of a drawn row's numbers in what DrawTokens returns.
enum Result { kToken, kLogit, kMax, kSum, kLogKept, kIsSound, kNumResults };
static_assert(kNumResults == kResultNumbers);

// Returns, for each row, the index of the first sum [N, K] above `target` [N, 1]. The last sum is
// `total` [N, 1], to which rounding may have brought the target: it stays below, so that the index
// is that of a weight.
at::Tensor FirstAbove(const at::Tensor& sums, const at::Tensor& target, const at::Tensor& total) {
  const double below_one = 1.0 - std::numeric_limits<double>::epsilon();
  return sums.le(at::minimum(target, total * below_one)).sum(1, /*keepdim=*/true);
}

// Returns the tokens [N, 1] at which the cumulative weights [N, V] exceed u times their sum
// `total` [N, 1]; by blocks, as the sampler of the host does it.
at::Tensor Invert(const at::Tensor& weights, const at::Tensor& sums_of_blocks, const at::Tensor& u,
                  const at::Tensor& total) {
  const at::Tensor sums = sums_of_blocks.cumsum(1);
  const at::Tensor target = u * total;
  const at::Tensor last = sums.narrow(1, sums.size(1) - 1, 1);
  const at::Tensor block = FirstAbove(sums, target, last).clamp_max(sums.size(1) - 1);
  // Rounding may bring it below 0, and then a weight of 0 would be chosen.
  const at::Tensor rest = (target - (sums - sums_of_blocks).gather(1, block)).clamp_min_(0);
  const at::Tensor columns = block * kBlock + at::arange(kBlock, block.options());
  const at::Tensor inside = weights.gather(1, columns).cumsum(1, at::kDouble);
  return block * kBlock + FirstAbove(inside, rest, inside.narrow(1, kBlock - 1, 1));
}

// Returns the lowest id [N, 1] among the largest logits.
at::Tensor Largest(const at::Tensor& scaled, const at::Tensor& max) {
  const at::Tensor ids = at::arange(scaled.size(1), scaled.options().dtype(at::kLong));
  return at::where(scaled.eq(max), ids, scaled.size(1)).amin(1, /*keepdim=*/true);
}

// The cuts of rows, [N, 1] float64 each. Those that cut nothing are infinite.
struct CutsOfRows {
  at::Tensor top_k, top_p, log_min_p;

  CutsOfRows Of(int64_t row, int64_t rows) const {
    return {top_k.narrow(0, row, rows), top_p.narrow(0, row, rows), log_min_p.narrow(0, row, rows)};
  }
};

// Returns whether the cuts keep a token, [N, V]. `below` [N, V] are the scaled logits less the
// largest of their row, and `weights` their exponentials.
at::Tensor Kept(const at::Tensor& below, const at::Tensor& weights, const CutsOfRows& cuts) {
  const auto [sorted, ids] = below.sort(/*stable=*/true, /*dim=*/1, /*descending=*/true);
  const at::Tensor rank = at::arange(below.size(1), cuts.top_k.options());
  at::Tensor keeps = rank < cuts.top_k;
  const at::Tensor mass = weights.gather(1, ids).to(at::kDouble).mul_(keeps);
  const at::Tensor sums = mass.cumsum(1);
  // The token that reaches the mass stays.
  keeps.logical_and_(sums - mass < cuts.top_p * sums.narrow(1, sums.size(1) - 1, 1));
  keeps.logical_and_(sorted >= cuts.log_min_p.to(at::kFloat));
  return at::zeros_like(keeps).scatter_(1, ids, keeps);
}

// Sets the weights that the cuts do not keep to 0, some rows at a time: sorting takes memory.
void Cut(const at::Tensor& below, const at::Tensor& weights, const CutsOfRows& cuts) {
  constexpr int64_t kNumbers = int64_t{1} << 21;
  const int64_t step = std::max<int64_t>(kNumbers / below.size(1), 1);
  for (int64_t row = 0; row < below.size(0); row += step) {
    const int64_t rows = std::min(step, below.size(0) - row);
    const at::Tensor some = weights.narrow(0, row, rows);
    some.mul_(Kept(below.narrow(0, row, rows), some, cuts.Of(row, rows)));
  }
}

// Returns the sums [N, blocks] of weights [N, blocks * kBlock].
at::Tensor SumBlocks(const at::Tensor& weights) {
  return weights.unflatten(1, {-1, kBlock}).sum(2, /*keepdim=*/false, at::kDouble);
}

// The statistics of rows of logits, as float32 [N] each: the largest logit by the temperature, the
// sum of the exponentials below it, and the logit of the row's token, with the bits of the
// trainer's loss.
struct LossStatistics {
  LossStatistics(const at::Tensor& logits, const at::Tensor& scales, const at::Tensor& tokens)
      : all(at::empty({4, logits.size(0)}, logits.options().dtype(at::kFloat))) {
    ops::LogitStatistics(logits.to(at::kFloat).contiguous(), scales, tokens, /*first_label=*/0,
                         all[0], all[1], /*weighted=*/all[3], all[2]);
  }
  at::Tensor max() const { return all[0].unsqueeze(1); }
  at::Tensor sum() const { return all[1].unsqueeze(1); }
  at::Tensor logit() const { return all[2].unsqueeze(1); }

  at::Tensor all;
};

bool HasLossStatistics(const at::Tensor& logits) {
  return ops::HasLogitStatistics(logits.device(), at::kFloat);
}

// The temperature whose reciprocal multiplies logits: that of a greedy row is 1.
double DividingTemperature(const SamplingParams& sampling) {
  return sampling.temperature == 0 ? 1.0 : sampling.temperature;
}

}  // namespace

bool DrawsOnDevice(const OutputRow& row, int64_t num_token_ids) {
  if (row.num_top > 0) return false;
  if (row.token != OutputRow::kDraw) return row.token >= 0 && row.token < num_token_ids;
  return row.proposal.token == DraftProposal::kNone && row.distribution == nullptr;
}

DrawKinds WriteDrawNumbers(std::span<const OutputRow> rows, int64_t width, int64_t padded,
                           double* numbers) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  DrawKinds kinds;
  for (int64_t i = 0; i < padded; ++i, ++numbers) {
    const auto write = [&](const std::array<double, kDrawNumbers>& of_row) {
      for (size_t k = 0; k < of_row.size(); ++k)
        numbers[static_cast<int64_t>(k) * padded] = of_row[k];
    };
    if (i >= std::ssize(rows)) {
      write({1, 0, OutputRow::kDraw, kInfinity, kInfinity, -kInfinity});
      continue;
    }
    const OutputRow& row = rows[static_cast<size_t>(i)];
    const SamplingParams& sampling = *row.sampling;
    const bool draws = row.token == OutputRow::kDraw;
    const bool is_greedy = draws && sampling.temperature == 0;
    const bool cuts = draws && !is_greedy && Cuts(sampling, width);
    kinds.has_greedy |= is_greedy;
    kinds.has_given |= !draws;
    kinds.has_cuts |= cuts;
    write({DividingTemperature(sampling), is_greedy ? kGreedy : row.u,
           static_cast<double>(row.token),
           cuts && sampling.top_k > 0 ? static_cast<double>(sampling.top_k) : kInfinity,
           cuts && sampling.top_p < 1 ? sampling.top_p : kInfinity,
           cuts && sampling.min_p > 0 ? std::log(sampling.min_p) : -kInfinity});
  }
  return kinds;
}

at::Tensor DrawTokens(const at::Tensor& logits, const at::Tensor& numbers, const DrawKinds& kinds) {
  const int64_t width = logits.size(1);
  const at::Tensor given = numbers.unsqueeze(2);  // [kDrawNumbers, N, 1]
  const at::Tensor scales = given[0].to(at::kFloat).reciprocal();
  const at::Tensor scaled = logits.to(at::kFloat) * scales;
  const at::Tensor max = scaled.amax(1, /*keepdim=*/true), below = scaled - max;
  const int64_t blocks = (width + kBlock - 1) / kBlock;
  const at::Tensor weights = at::constant_pad_nd(below.exp(), {0, blocks * kBlock - width});
  at::Tensor sums = SumBlocks(weights);
  const at::Tensor total = sums.sum(1, /*keepdim=*/true);
  at::Tensor kept = total;
  if (kinds.has_cuts) {
    Cut(below, weights.narrow(1, 0, width),
        {.top_k = given[3], .top_p = given[4], .log_min_p = given[5]});
    sums = SumBlocks(weights);
    kept = sums.sum(1, /*keepdim=*/true);
  }
  at::Tensor token = Invert(weights, sums, given[1].clamp_min(0), kept);
  if (kinds.has_greedy) token = at::where(given[1].eq(kGreedy), Largest(scaled, max), token);
  if (kinds.has_given) token = at::where(given[2].ge(0), given[2].to(at::kLong), token);
  // A row with NaN or infinity has no token.
  const at::Tensor within = token.clamp(0, width - 1);
  at::Tensor logit, highest = max, sum = total;
  if (HasLossStatistics(logits)) {
    const LossStatistics statistics(logits, scales.squeeze(1), within);
    logit = statistics.logit();
    highest = statistics.max();
    sum = statistics.sum();
  } else {
    logit = scaled.gather(1, within);
  }
  const at::Tensor is_sound = highest.isfinite().logical_and_(sum.isfinite());
  return at::cat({within.to(at::kDouble), logit.to(at::kDouble), highest.to(at::kDouble),
                  sum.to(at::kDouble), (kept / total).log(), is_sound.to(at::kDouble)},
                 1);
}

at::Tensor RowStatistics(const at::Tensor& logits, std::span<const OutputRow> rows) {
  if (!HasLossStatistics(logits)) return {};
  std::vector<double> temperatures;
  for (const OutputRow& row : rows) temperatures.push_back(DividingTemperature(*row.sampling));
  const at::Tensor scales =
      CopyToDevice(temperatures, logits.device()).to(at::kFloat).reciprocal_();
  const at::Tensor tokens = at::zeros(scales.sizes(), scales.options().dtype(at::kLong));
  return LossStatistics(logits, scales, tokens).all.narrow(0, 0, 2);
}

void DeviceDraws::Clear() {
  drawn_.clear();
  results_.clear();
  was_sent_ = false;
}

void DeviceDraws::Draw(const at::Tensor& logits, std::span<const OutputRow> rows,
                       std::span<absl::StatusOr<SampledToken>> results) {
  const int64_t count = logits.size(0);
  std::vector<double> numbers(static_cast<size_t>(kDrawNumbers * count));
  const DrawKinds kinds = WriteDrawNumbers(rows, logits.size(1), count, numbers.data());
  const at::Tensor on_device = CopyToDevice(numbers, logits.device()).view({kDrawNumbers, count});
  Add(DrawTokens(logits, on_device, kinds), results);
}

void DeviceDraws::Add(const at::Tensor& drawn, std::span<absl::StatusOr<SampledToken>> results) {
  drawn_.push_back(drawn);
  results_.push_back(results);
}

void DeviceDraws::Send() {
  if (drawn_.empty()) return;
  if (drawn_.size() > 1) drawn_ = {at::cat(drawn_)};
  const at::Tensor& drawn = drawn_.front();
  was_sent_ = true;
  if (drawn.is_cpu()) {
    on_host_ = drawn;
    return;
  }
  const int64_t rows = drawn.size(0);
  if (!on_host_.defined() || on_host_.size(0) < rows) {
    on_host_ = at::empty(drawn.sizes(), at::dtype(at::kDouble).pinned_memory(true));
  }
  on_host_.narrow(0, 0, rows).copy_(drawn, /*non_blocking=*/true);
  const at::Device device = drawn.device();
  if (!sent_.has_value()) sent_.emplace(device.type());
  sent_->record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
}

at::Tensor DeviceDraws::Tokens() const {
  TORCH_CHECK(was_sent_ && drawn_.size() == 1, "the rows were not drawn on the device");
  return drawn_.front().select(1, kToken);
}

void DeviceDraws::Read() {
  if (!was_sent_) return;
  if (sent_.has_value()) sent_->synchronize();
  const double* values = on_host_.const_data_ptr<double>();
  for (const auto& results : results_) {
    for (absl::StatusOr<SampledToken>& result : results) {
      if (values[kIsSound] == 0) {
        result = TandemSampler::BrokenLogits();
      } else {
        result = SampledToken{.token = static_cast<int32_t>(values[kToken]),
                              .logprob = static_cast<float>(kernels::LogProb(
                                  values[kLogit], {.max = values[kMax], .sum = values[kSum]})),
                              .log_keep_mass = static_cast<float>(values[kLogKept])};
      }
      values += kResultNumbers;
    }
  }
}

}  // namespace tandem::rollout
