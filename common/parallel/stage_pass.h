// The way of a replica's micro-batches through one stage of its pipeline: the part of
// MegatronStrategy that runs the model.
#ifndef TANDEM_COMMON_PARALLEL_STAGE_PASS_H_
#define TANDEM_COMMON_PARALLEL_STAGE_PASS_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/model/model.h"
#include "common/model/ragged_batch.h"
#include "common/parallel/block_pass.h"
#include "common/parallel/context_shard.h"
#include "common/parallel/parallel_mesh.h"
#include "common/parallel/pipeline_schedule.h"
#include "common/parallel/recompute.h"

namespace tandem::parallel {

// What a stage is made of. All of it outlives the passes.
struct Stage {
  const Model& model;
  ParallelMesh& mesh;
  PipelineShape shape;
  Recompute recompute = Recompute::kNone;

  int64_t index() const { return mesh.at.pipeline; }
  bool is_last() const { return index() + 1 == shape.stages; }
};

class StagePass {
 public:
  // What becomes of a micro-batch's hidden states [T, H], a leaf, on the ranks of the last stage:
  // their gradient, of which every tensor and context rank has a part; undefined where nothing
  // requires it. After an error it is not called again.
  using Then = absl::FunctionRef<absl::StatusOr<at::Tensor>(
      int64_t micro_batch, const RaggedBatch& batch, const at::Tensor& hidden)>;

  // `batches` are whole.
  StagePass(const Stage& stage, std::vector<RaggedBatch> batches);

  // Runs a schedule of all stages; without gradients only what is forward. Every rank of the
  // replica takes part to the end, with zeros for what it cannot compute; the error is that of this
  // rank, or of `then` on another of its stage. Throws c10::Error where communication fails.
  absl::Status Run(Then then);

 private:
  // Of a chunk and micro-batch that ran forward.
  struct Open {
    std::unique_ptr<BlockPass> pass;
    at::Tensor gradient;  // of the last part: of what its last block returned
  };
  struct Sent {
    at::Tensor tensor;
    Pending pending;  // waits before the tensor goes
  };
  using Sends = std::deque<Sent>;

  int64_t Part(int64_t chunk) const { return chunk * stage_.shape.stages + stage_.index(); }
  bool IsLastPart(int64_t chunk) const;
  // Whether a gradient travels back into the blocks before `block`.
  bool TrainsBefore(int64_t block) const;
  BlockRange Blocks(int64_t chunk) const;

  void Forward(const PipelineAction& action, Then then);
  void Backward(const PipelineAction& action);
  // Computes unless there has been an error; false if there is one.
  bool Try(const char* what, absl::FunctionRef<absl::Status()> compute);
  at::Tensor Finish(int64_t micro_batch, const at::Tensor& hidden, Then then);

  // The stage that runs what comes after this one's part (step 1) or before it (-1), in the group
  // for what goes forward or back between the two.
  struct Neighbour {
    Communicator& group;
    int rank;
  };
  Neighbour NeighbourAt(int64_t step, bool is_forward) const;

  std::unique_ptr<BlockPass> StartPass(int64_t micro_batch) const;
  // Hidden states of this rank between blocks, or their gradients, for it to receive.
  at::Tensor EmptyHidden(int64_t micro_batch) const;
  at::Tensor Receive(int64_t micro_batch, const Neighbour& from) const;
  static void Send(const at::Tensor& tensor, const Neighbour& to, Sends& sends);

  const Stage stage_;
  const std::vector<RaggedBatch> batches_;
  std::vector<ContextShard> shards_;  // of them; empty without context parallelism
  int64_t first_trained_block_ = 0;
  absl::Status status_;
  std::map<std::pair<int64_t, int64_t>, Open> open_;  // by chunk and micro-batch
  Sends forward_sends_, backward_sends_;
};

}  // namespace tandem::parallel

#endif  // TANDEM_COMMON_PARALLEL_STAGE_PASS_H_
