// For tests: requests of an engine of tiny models.
#ifndef TANDEM_SERVICES_ROLLOUT_ENGINE_TESTING_REQUESTS_H_
#define TANDEM_SERVICES_ROLLOUT_ENGINE_TESTING_REQUESTS_H_

#include <cstdint>

#include "services/rollout/engine/types.h"

namespace tandem::rollout {

inline constexpr SelectionStrategy kStrategies[] = {
    SelectionStrategy::kBernoulli, SelectionStrategy::kChunk, SelectionStrategy::kAlternating,
    SelectionStrategy::kSentence, SelectionStrategy::kWord};

// Returns a request for 24 tokens after a prompt of 9, which are ids from 3 to 60 and depend on the
// seed. Chunks and gaps are short enough for several in one response.
inline PromptRequest RequestOf(const TandemConfig& tandem, uint64_t seed = 7) {
  PromptRequest request;
  for (uint64_t i = 0; i < 9; ++i) {
    request.prompt_token_ids.push_back(3 + static_cast<int32_t>((seed * 13 + i * 7) % 58));
  }
  request.sampling.max_tokens = 24;
  request.tandem = tandem;
  request.tandem.chunk_size = 4;
  request.tandem.max_gap_tokens = 5;
  request.seed = seed;
  return request;
}

}  // namespace tandem::rollout

#endif  // TANDEM_SERVICES_ROLLOUT_ENGINE_TESTING_REQUESTS_H_
