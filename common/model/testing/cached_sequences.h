// For tests: sequences in a KV cache, each in blocks of its own, with cursors that move as the
// sequences are decoded.
#ifndef TANDEM_COMMON_MODEL_TESTING_CACHED_SEQUENCES_H_
#define TANDEM_COMMON_MODEL_TESTING_CACHED_SEQUENCES_H_

#include <ATen/ATen.h>

#include <cstdint>
#include <numeric>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/model/model.h"
#include "common/model/passes/kv_cache.h"

namespace tandem {

class CachedSequences {
 public:
  // The tokens that a sequence consumes, and the number of hidden states wanted: the last ones.
  struct Input {
    int64_t sequence = 0;
    absl::Span<const int64_t> tokens;
    int64_t num_output_rows = 1;
    const PromptImages* images = nullptr;
    bool records_routing = false;
  };

  // `model` outlives this. Blocks of a sequence do not follow each other in the cache.
  CachedSequences(const Model& model, int64_t count, int64_t max_tokens)
      : model_(model),
        blocks_per_sequence_(KvBlocks(max_tokens)),
        cache_(model.CacheLayout(), count * blocks_per_sequence_, model.device(), model.dtype(),
               model.config().RoutingLayout()),
        tables_(count),
        cursors_(count, 0) {
    for (int64_t s = 0; s < count; ++s) {
      for (int64_t b = 0; b < blocks_per_sequence_; ++b) {
        tables_[s].push_back(static_cast<int32_t>(b * count + s));
      }
    }
  }

  KvCache& cache() { return cache_; }
  // The rows of KvCache::routing that belong to the first `count` tokens of a sequence.
  at::Tensor Routing(int64_t sequence, int64_t count) const {
    std::vector<at::Tensor> blocks;
    for (const int32_t block : tables_[sequence]) {
      blocks.push_back(cache_.routing().narrow(0, block * kKvBlockTokens, kKvBlockTokens));
    }
    return at::cat(blocks).narrow(0, 0, count);
  }
  int64_t cursor(int64_t sequence) const { return cursors_[sequence]; }
  void Truncate(int64_t sequence, int64_t length) { cursors_[sequence] = length; }
  // Gives sequence `to` the first `length` tokens of sequence `from`.
  void CopyPrefix(int64_t from, int64_t to, int64_t length) {
    for (int64_t b = 0; b < KvBlocks(length); ++b) {
      cache_.CopyBlock(tables_[from][b], tables_[to][b]);
    }
    cursors_[to] = length;
  }

  // Model::Decode of the inputs; moves their cursors.
  absl::StatusOr<at::Tensor> Decode(const std::vector<Input>& inputs) {
    std::vector<std::vector<int32_t>> tokens;
    std::vector<std::vector<int64_t>> rows;
    for (const Input& input : inputs) {
      tokens.emplace_back(input.tokens.begin(), input.tokens.end());
      rows.emplace_back(input.num_output_rows);
      std::iota(rows.back().begin(), rows.back().end(),
                static_cast<int64_t>(input.tokens.size()) - input.num_output_rows);
    }
    std::vector<DecodeInput> decode;
    std::vector<std::vector<at::Tensor>> image_rows(inputs.size());
    for (size_t i = 0; i < inputs.size(); ++i) {
      if (inputs[i].images != nullptr) {
        for (const auto& input : inputs[i].images->inputs) {
          image_rows[i].push_back(model_.ImageRows(input));
        }
      }
      decode.push_back({.blocks = tables_[inputs[i].sequence],
                        .start = cursors_[inputs[i].sequence],
                        .tokens = tokens[i],
                        .output_rows = rows[i],
                        .records_routing = inputs[i].records_routing,
                        .images = inputs[i].images});
    }
    absl::StatusOr<at::Tensor> hidden = model_.Decode(cache_, decode, image_rows);
    if (!hidden.ok()) return hidden;
    for (const Input& input : inputs) {
      cursors_[input.sequence] += static_cast<int64_t>(input.tokens.size());
    }
    return hidden;
  }

 private:
  const Model& model_;
  const int64_t blocks_per_sequence_;
  KvCache cache_;
  std::vector<std::vector<int32_t>> tables_;
  std::vector<int64_t> cursors_;
};

}  // namespace tandem

#endif  // TANDEM_COMMON_MODEL_TESTING_CACHED_SEQUENCES_H_
