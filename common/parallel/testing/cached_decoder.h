// For tests of shards: a model that decodes two cached sequences.
#ifndef TANDEM_COMMON_PARALLEL_TESTING_CACHED_DECODER_H_
#define TANDEM_COMMON_PARALLEL_TESTING_CACHED_DECODER_H_

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/types/span.h"
#include "common/model/model.h"
#include "common/model/testing/cached_sequences.h"
#include "common/model/testing/packed_model.h"

namespace tandem {

struct CachedDecoder {
  std::unique_ptr<Model> model;
  CachedSequences sequences;

  explicit CachedDecoder(std::unique_ptr<Model> inference_model)
      : model(std::move(inference_model)), sequences(*model, 2, 32) {}

  // Returns the logits [N, V] of the wanted rows.
  at::Tensor Logits(const std::vector<CachedSequences::Input>& inputs) {
    const c10::InferenceMode inference_mode;
    return model->ForwardLogits(sequences.Decode(inputs).value()).to(at::kFloat);
  }
};

// Decodes two prompts, one of them in chunks, and then one token of each.
inline std::vector<at::Tensor> DecodeSome(CachedDecoder& decoder) {
  const std::vector<int64_t> first = {5, 1, 7, 11, 2}, second = {9, 57, 3}, third = {4},
                             fourth = {56};
  return {decoder.Logits({{0, absl::MakeSpan(first).subspan(0, 3), 3}, {1, second, 1}}),
          decoder.Logits({{0, absl::MakeSpan(first).subspan(3), 1}}),
          decoder.Logits({{1, third, 1}, {0, fourth, 1}})};
}

// `packed` has the bits of `dense` with the values of its packed weights.
inline void ExpectBitsOfDenseWeights(CachedDecoder& packed, CachedDecoder& dense) {
  CopyComputedValues(*packed.model, *dense.model);
  const std::vector<at::Tensor> expected = DecodeSome(dense), actual = DecodeSome(packed);
  for (size_t i = 0; i < expected.size(); ++i) EXPECT_TRUE(at::equal(actual[i], expected[i]));
}

// `alone` and `batched` are decoders of one model: a sequence has the same bits in one pass alone
// and in passes beside another sequence.
inline void ExpectRowsDoNotDependOnTheirBatch(CachedDecoder& alone, CachedDecoder& batched) {
  const std::vector<int64_t> tokens = {5, 1, 7, 11, 2, 33, 20}, other = {9, 57, 3, 8, 41};
  const at::Tensor expected = alone.Logits({{0, tokens, 7}});
  std::vector<at::Tensor> rows = {
      batched.Logits({{1, other, 5}, {0, absl::MakeSpan(tokens).subspan(0, 4), 4}})
          .narrow(0, 5, 4)};
  for (size_t t = 4; t < tokens.size(); ++t) {
    const std::vector<int64_t> beside = {other[t - 4]};
    rows.push_back(batched.Logits({{0, absl::MakeSpan(tokens).subspan(t, 1), 1}, {1, beside, 1}})
                       .narrow(0, 0, 1));
  }
  EXPECT_TRUE(at::equal(at::cat(rows), expected));
}

}  // namespace tandem

#endif  // TANDEM_COMMON_PARALLEL_TESTING_CACHED_DECODER_H_
