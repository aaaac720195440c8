// Runs a replica's micro-batches through one stage of its pipeline: forward, loss and backward, as
// PipelineSchedule orders them. Used by MegatronStrategy.
#ifndef TANDEM_COMMON_PARALLEL_MEGATRON_STAGE_PASS_H_
#define TANDEM_COMMON_PARALLEL_MEGATRON_STAGE_PASS_H_

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
#include "common/model/passes/ragged_batch.h"
#include "common/parallel/context/context_shard.h"
#include "common/parallel/megatron/parallel_mesh.h"
#include "common/parallel/megatron/pipeline_schedule.h"
#include "common/parallel/memory/recompute.h"
#include "common/parallel/zero/block_pass.h"

namespace tandem::parallel {

// A pipeline stage on this rank. Everything that it refers to outlives the passes.
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
  // Receives a micro-batch's hidden states [T, H], a leaf, on the ranks of the last stage, and
  // returns their gradient: on every tensor and context rank a summand of it; undefined where
  // nothing requires it. Not called again after an error.
  using Then = absl::FunctionRef<absl::StatusOr<at::Tensor>(
      int64_t micro_batch, const RaggedBatch& batch, const at::Tensor& hidden)>;

  // `batches` hold whole sequences. An empty one has no output: it runs so that the stage takes
  // part in the exchanges of the others.
  StagePass(const Stage& stage, std::vector<RaggedBatch> batches);

  // Runs this stage's schedule; without gradients its forward actions alone. Every rank of the
  // replica takes part to the end, after an error with zeros in place of what it cannot compute.
  // Returns an error of this rank, or of `then` on another rank of ParallelMesh::coupled. Throws
  // c10::Error where communication fails.
  absl::Status Run(Then then);

 private:
  // A micro-batch that ran forward through a virtual stage and has not run back.
  struct Open {
    std::unique_ptr<BlockPass> pass;
    at::Tensor gradient;  // of the model's output, where the virtual stage ends the model
  };
  struct Sent {
    at::Tensor tensor;
    ranks::CollectiveHandle handle;  // destroyed, and so waited for, before the tensor
  };
  using Sends = std::deque<Sent>;

  // A virtual stage's place among all virtual stages of the model.
  int64_t Position(int64_t virtual_stage) const {
    return virtual_stage * stage_.shape.stages + stage_.index();
  }
  bool EndsTheModel(int64_t virtual_stage) const;
  // Whether a gradient travels back into the blocks before `block`.
  bool TrainsBefore(int64_t block) const;
  BlockRange Blocks(int64_t virtual_stage) const;

  void Forward(const PipelineAction& action, Then then);
  void Backward(const PipelineAction& action);
  // Computes unless there has been an error. Returns whether there has been none.
  bool Try(const char* what, absl::FunctionRef<absl::Status()> compute);
  at::Tensor Finish(int64_t micro_batch, const at::Tensor& hidden, Then then);

  // The stage that runs the model's next virtual stage (step 1) or previous one (-1), as a rank of
  // the group through which hidden states or gradients pass between the two.
  struct Neighbour {
    ranks::Communicator& group;
    int rank;
  };
  Neighbour NeighbourAt(int64_t step, bool is_forward) const;

  std::unique_ptr<BlockPass> StartPass(int64_t micro_batch) const;
  // Returns memory for hidden states of this rank between blocks, or for their gradients.
  at::Tensor EmptyHidden(int64_t micro_batch) const;
  at::Tensor Receive(int64_t micro_batch, const Neighbour& from) const;
  static void Send(const at::Tensor& tensor, const Neighbour& to, Sends& sends);

  const Stage stage_;
  const std::vector<RaggedBatch> batches_;
  std::vector<ContextShard> shards_;  // of the batches; empty without context parallelism
  int64_t first_trained_block_ = 0;
  absl::Status status_;
  std::map<std::pair<int64_t, int64_t>, Open> open_;  // by virtual stage and micro-batch
  Sends forward_sends_, backward_sends_;
};

}  // namespace tandem::parallel

#endif  // TANDEM_COMMON_PARALLEL_MEGATRON_STAGE_PASS_H_
