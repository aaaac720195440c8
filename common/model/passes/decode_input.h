// The input of one sequence in a pass with a KV cache. It has no tensors, so that the planning of
// passes, and its tests, need none.
#ifndef TANDEM_COMMON_MODEL_PASSES_DECODE_INPUT_H_
#define TANDEM_COMMON_MODEL_PASSES_DECODE_INPUT_H_

#include <cstdint>
#include <span>

#include "common/model/vision/prompt_images.h"

namespace tandem {

struct DecodeInput {
  // The block table: blocks[i] of the cache holds the positions from i * kKvBlockTokens on. Blocks
  // that are written now are in no other table.
  std::span<const int32_t> blocks;
  int64_t start = 0;  // position of the first token; the blocks hold those before
  // Consumed by the pass, at least one. They need not be tokens that the sequence keeps: a draft is
  // verified by drawing from the rows before it.
  std::span<const int32_t> tokens;
  std::span<const int64_t> output_rows;  // rows that are wanted: ascending indices into `tokens`
  // Whether the experts that the tokens take are recorded (KvCache::routing), for a model that has
  // experts. The last layer then computes the rows of all tokens of the pass.
  bool records_routing = false;
  const PromptImages* images = nullptr;  // of the sequence's prompt; nullptr: text alone
};

}  // namespace tandem

#endif  // TANDEM_COMMON_MODEL_PASSES_DECODE_INPUT_H_
