// A batch of sequences without padding.
#ifndef TANDEM_COMMON_MODEL_PASSES_RAGGED_BATCH_H_
#define TANDEM_COMMON_MODEL_PASSES_RAGGED_BATCH_H_

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "common/model/vision/vision_config.h"
#include "common/ops/attention/sequence_tables.h"

namespace tandem {

class RouterLosses;

// The images and videos of a batch. `token_rows` [N] int64 are the rows of the batch that stand for
// an image, in any order, and `tower_rows` [N] int64 say which row of the vision tower's output
// each one gets. Tensors are on the device of the batch.
struct BatchImages {
  // The input of the tower: patches [P, VisionConfig::patch_values] float32, image by image, and
  // their grids.
  at::Tensor pixel_values;
  std::vector<VisionGrid> grids;
  // The tower's output [rows, H], where it is known already; then it does not run.
  at::Tensor rows_of_tower;
  at::Tensor token_rows;
  at::Tensor tower_rows;
  // [3, T] int64: every token's position in time, height and width (vision/image_positions.h).
  // Undefined for text alone, where all three are the position.
  at::Tensor rotary_positions;
  int64_t rotary_end = 0;  // every one is below this

  bool empty() const { return !token_rows.defined() || token_rows.numel() == 0; }
};

// Inputs and records of the routers of a mixture of experts in a pass.
struct BatchRouting {
  // [T, layers with experts, k]: the experts that tokens take, in training that replays a rollout's
  // choices; the router still weighs them. Negative: the token's router chooses itself. Undefined:
  // all do.
  at::Tensor given;
  // Gets the experts [T, k] int64 that the tokens took in each layer; nullptr: no record.
  std::vector<at::Tensor>* chosen = nullptr;
  // Records the routers' losses and the experts' loads, in training (router_losses.h);
  // nullptr: no record, and no losses.
  std::shared_ptr<RouterLosses> losses = nullptr;
};

// S sequences, T rows in all. Tensors are on one device, the rest on the host. Sequence s owns
// rows [offsets[s], offsets[s + 1]), one for each of its tokens or, with `tables.prefixes`, for
// those that it does not share with the sequence before it.
struct RaggedBatch {
  at::Tensor tokens;             // [T] int64
  at::Tensor positions;          // [T] int64; the first token of a whole sequence is at 0
  std::vector<int64_t> offsets;  // S + 1 values from 0 to T, never decreasing
  int64_t positions_end = 0;     // every position is below this
  BatchImages images = {};
  BatchRouting routing = {};
  ops::SequenceTables tables = {};  // for attention without a cache

  // Returns the row of a token of sequence s.
  int64_t RowOf(size_t s, int64_t position) const {
    return tables.prefixes == nullptr ? offsets[s] + position : tables.prefixes->RowOf(s, position);
  }
  // Number of rows.
  int64_t num_tokens() const { return offsets.empty() ? 0 : offsets.back(); }
};

// Makes a batch of whole sequences, positions from 0, on the device of the model that will run
// them. With `starts`, sequence s shares its first starts[s] tokens with sequence s - 1, which has
// the same.
RaggedBatch MakeRaggedBatch(const std::vector<std::vector<int64_t>>& sequences,
                            at::Device device = at::kCPU, const std::vector<int64_t>& starts = {});

}  // namespace tandem

#endif  // TANDEM_COMMON_MODEL_PASSES_RAGGED_BATCH_H_
