// One response with its provenance, as plain data. The rollout engine writes it, and the trainer's
// reads it. Mirrors tandem.types.v1.Trajectory, but for accepted_draft_mask, on which nothing
// depends.
#ifndef TANDEM_COMMON_COAUTHORING_TRAJECTORY_H_
#define TANDEM_COMMON_COAUTHORING_TRAJECTORY_H_

#include <cstdint>
#include <string>
#include <vector>

#include "common/coauthoring/author.h"
#include "common/coauthoring/tandem_config.h"
#include "common/tensor/vision_reference.h"
#include "common/weights/weights_version.h"

namespace tandem {

enum class FinishReason {
  kUnspecified,  // refused by the trainer
  kStop,         // the last token is an end-of-sequence or stop id
  kLength,       // max_tokens or the model's limit was reached
};

// A run of response tokens written under the same weights of the senior.
struct VersionRun {
  WeightsVersion weights;
  int64_t count = 0;  // at least 1

  bool operator==(const VersionRun&) const = default;
};

// The experts that the tokens of a sequence took in each layer of the senior that has experts.
struct TokenExperts {
  int64_t layers = 0;
  int64_t experts_per_token = 0;
  // [tokens, layers, experts_per_token], ascending in each token and layer.
  std::vector<uint16_t> ids;

  bool empty() const { return ids.empty(); }
  int64_t ids_per_token() const { return layers * experts_per_token; }
  bool operator==(const TokenExperts&) const = default;
};

// The likeliest tokens of each of several distributions.
struct TopTokens {
  int64_t count = 0;            // in each distribution; 0: not asked for
  std::vector<int32_t> ids;     // [distributions, count], the likeliest first
  std::vector<float> logprobs;  // of the same shape

  bool operator==(const TopTokens&) const = default;
};

// L = response_token_ids.size(). Every per-token vector has L entries, or may be empty where noted.
struct Trajectory {
  std::vector<int32_t> prompt_token_ids;
  std::vector<int32_t> response_token_ids;
  std::vector<Author> authorship_mask;
  // log-softmax(logits / temperature) of the emitted token, before any cut.
  std::vector<float> author_logprobs;       // under the token's author
  std::vector<float> other_logprobs;        // under the other model; empty when not computed
  std::vector<float> log_keep_mass;         // log mass that the cut kept; empty means all 0
  std::vector<VersionRun> senior_versions;  // counts sum to L
  std::string junior_version;               // digest of the junior's weights; empty with tandem off
  FinishReason finish_reason = FinishReason::kUnspecified;
  uint64_t seed = 0;
  uint64_t sample_index = 0;
  SamplingParams sampling;
  TandemConfig tandem;
  // One entry for each token but the last: prompt_token_ids.size() + L - 1. Empty: not recorded.
  TokenExperts routed_experts;
  std::vector<VisionReference> vision_inputs = {};  // in the order of their tokens
  int64_t response_offset = 0;  // tokens of the response before these, which are not in it
  TopTokens top_tokens = {};    // of each token's author; nothing depends on it

  bool operator==(const Trajectory&) const = default;
};

}  // namespace tandem

#endif  // TANDEM_COMMON_COAUTHORING_TRAJECTORY_H_
