// The choices of a request: who writes (TandemConfig), and how tokens are drawn (SamplingParams).
#ifndef TANDEM_COMMON_COAUTHORING_TANDEM_CONFIG_H_
#define TANDEM_COMMON_COAUTHORING_TANDEM_CONFIG_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"

namespace tandem {

// The rule that chooses the author of token t; AuthorSelector defines the rules.
enum class SelectionStrategy { kBernoulli, kChunk, kAlternating, kSentence, kWord, kTurn };

struct TandemConfig {
  // False: the senior writes everything and the junior never runs.
  bool enabled = true;
  SelectionStrategy selection_strategy = SelectionStrategy::kBernoulli;
  // Probability that a coin gives the senior (bernoulli and word).
  double prob_senior = 0.5;
  // Tokens per turn (chunk). 0 means "not given" and is an error with `chunk`.
  int32_t chunk_size = 0;
  // A new coin is drawn after this many tokens without one (word).
  int32_t max_gap_tokens = 32;
  // Replaces the strategy's default boundary set when not empty (sentence and word).
  std::vector<int32_t> boundary_token_ids = {};

  friend bool operator==(const TandemConfig&, const TandemConfig&) = default;
};

struct SamplingParams {
  // Divides the logits; 0 or in [0.001, 100]. 0 is greedy, and log-probs are then of temperature 1.
  double temperature = 1.0;
  // Keep the k most likely tokens; 0 keeps all.
  int32_t top_k = 0;
  // Keep the shortest list of most likely tokens whose mass (after top-k) reaches top_p.
  double top_p = 1.0;
  // Keep tokens at least min_p times as likely as the most likely one.
  double min_p = 0.0;
  // Most response tokens, the stop token included.
  int32_t max_tokens = 16;
  // Ids that end a sequence, besides the model's EOS ids.
  std::vector<int32_t> stop_token_ids = {};
  // Whether the model's EOS ids do not end the sequence (stop_token_ids still do).
  bool ignore_eos = false;
  // Texts that end a sequence with the token that completes one of them; see StopTextFinder.
  std::vector<std::string> stop = {};

  friend bool operator==(const SamplingParams&, const SamplingParams&) = default;
};

// Whether top_k, and whether one of top_k, top_p and min_p, can leave tokens out.
bool CutsByCount(const SamplingParams& params, int64_t num_token_ids);
bool Cuts(const SamplingParams& params, int64_t num_token_ids);

// Bounds of the lists, which every trajectory repeats.
inline constexpr size_t kMaxStopTokenIds = 256;
inline constexpr size_t kMaxBoundaryTokenIds = 4096;
// Bounds of the stop texts, which are looked for after every token.
inline constexpr size_t kMaxStopTexts = 16;
inline constexpr size_t kMaxStopTextBytes = 256;

// INVALID_ARGUMENT with the field's path ("prob_senior", "boundary_token_ids[2]", …). Ids must be
// in [0, num_token_ids), none twice, and lists within the bounds above. Fields that the strategy
// does not read are checked for range all the same, except that chunk_size and max_gap_tokens may
// be 0 where they are not read.
absl::Status Validate(const TandemConfig& config, int64_t num_token_ids);
absl::Status Validate(const SamplingParams& params, int64_t num_token_ids);

}  // namespace tandem

#endif  // TANDEM_COMMON_COAUTHORING_TANDEM_CONFIG_H_
