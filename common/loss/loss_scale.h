// The factor of every token in the loss of a *global* batch.
//
// The loss of a batch is sum_t scale_t * term_t. The factors are computed once, before the first
// micro-batch, so the loss does not depend on micro-batching, packing or data parallelism.
#ifndef TANDEM_COMMON_LOSS_LOSS_SCALE_H_
#define TANDEM_COMMON_LOSS_LOSS_SCALE_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace tandem::loss {

enum class Aggregation {
  kTokenMean,           // sum over tokens / number of counted tokens
  kTokenSum,            // sum over tokens
  kSeqMeanTokenSum,     // mean over sequences of the sum over tokens
  kSeqMeanTokenMean,    // mean over sequences of the mean over counted tokens
  kSeqMeanTokenSumNorm  // mean over sequences of the sum over tokens / a constant (Dr.GRPO)
};

// How tokens count in the denominators of Aggregation. The reference implementation of Tandem
// Reinforcement Learning uses kAllTokens: junior tokens stay in the denominator.
enum class Normalizer {
  kAllTokens,      // every response token
  kNonzeroWeight,  // tokens with a weight > 0
  kSumOfWeights    // each token counts as its weight
};

struct LossScaleOptions {
  Aggregation aggregation = Aggregation::kTokenMean;
  Normalizer normalizer = Normalizer::kNonzeroWeight;
  double norm_constant = 0;  // the constant of kSeqMeanTokenSumNorm, which needs one > 0

  bool operator==(const LossScaleOptions&) const = default;
};

struct LossScales {
  std::vector<double> scales;     // [N], w_t / Z_t: every term is multiplied by it
  double total_weight = 0;        // sum of the weights; 0: no token is learnt from
  int64_t counted_sequences = 0;  // sequences with a counted token: the divisor of a SEQ_MEAN
};

// INVALID_ARGUMENT "norm_constant".
absl::Status CheckLossScaleOptions(const LossScaleOptions& options);

// Computes the scales of a batch. `weights` [N] are the weights of all *response* tokens, sequence
// after sequence: the response mask times 1 or junior_token_loss_weight, finite and >= 0. The
// `sequence_lengths` [S] add up to N. A sequence without a counted token is left out of a SEQ_MEAN.
// If no token counts, every scale is 0. INVALID_ARGUMENT "weights[i]", "sequence_lengths" or
// "norm_constant".
absl::StatusOr<LossScales> ComputeLossScales(const LossScaleOptions& options,
                                             absl::Span<const double> weights,
                                             absl::Span<const int64_t> sequence_lengths);

}  // namespace tandem::loss

#endif  // TANDEM_COMMON_LOSS_LOSS_SCALE_H_
