// Memory for the numbers that change from one pass of decoding to the next, at addresses that stay,
// so that a graph (common/tensor/aten/device_graph.h) can repeat the pass: passes are padded to a
// few shapes, and one copy to the device fills the numbers of a pass.
#ifndef TANDEM_COMMON_MODEL_PASSES_DECODE_BUFFERS_H_
#define TANDEM_COMMON_MODEL_PASSES_DECODE_BUFFERS_H_

#include <ATen/core/Tensor.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "common/model/passes/decode_input.h"
#include "common/model/passes/decode_shape.h"
#include "common/model/passes/layer_cache.h"
#include "common/model/passes/ragged_batch.h"
#include "common/ops/attention/paged_sequences.h"

namespace tandem {

// A pass whose numbers lie on the device, as Model::Decode reads it.
struct DecodeBatch {
  RaggedBatch batch;  // without the offsets of its sequences
  ops::PagedSequences sequences;
  at::Tensor wanted;  // [R] int64
};

class DecodeBuffers {
 public:
  // For a model whose attention layers have these caches, and `heads` query heads, on a device
  // where the kernel paged_attention takes them; for sequences of at most `max_tokens`, and `extra`
  // numbers beside each wanted row.
  DecodeBuffers(const std::vector<LayerCache>& layers, int64_t heads, int64_t max_tokens,
                int64_t extra, at::Device device);

  int64_t max_tokens() const { return max_tokens_; }

  // Overwrites the numbers of a pass of a shape with those of the inputs, which fit it; the caller
  // overwrites Extra. The device must have read those of the last pass but one. Padding rows are of
  // no sequence: token 0 at position 0, which no cache gets and which attends to nothing; padding
  // wanted rows are row 0.
  void Fill(const DecodeShape& shape, std::span<const DecodeInput> inputs);
  // Returns the extra numbers [extra][shape.wanted] on the host.
  std::span<double> Extra(const DecodeShape& shape);
  // Copies all of them to the device, on the current stream. The host does not wait.
  void Upload(const DecodeShape& shape);
  // Replaces the first `rows` tokens there, which are indices, by those of `drawn` [N] float64.
  void ReplaceTokens(const DecodeShape& shape, int64_t rows, const at::Tensor& drawn);

  // Returns the numbers of a shape, where the device has them.
  DecodeBatch Batch(const DecodeShape& shape) const;
  at::Tensor DeviceExtra(const DecodeShape& shape) const;  // [extra, shape.wanted] float64

 private:
  std::vector<AttentionPlan> plans_;
  const int64_t max_tokens_, extra_;
  // [bytes] uint8, of the largest shape. Those on the host are pinned, and filled in turns: the
  // device reads one when it gets to it.
  std::array<at::Tensor, 2> host_;
  size_t filled_ = 0;  // of them, last
  at::Tensor device_;
  at::Tensor replaced_;  // [kMaxDecodeRows] float64 on the device
};

}  // namespace tandem

#endif  // TANDEM_COMMON_MODEL_PASSES_DECODE_BUFFERS_H_
