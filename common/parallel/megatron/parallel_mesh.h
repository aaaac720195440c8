// The process groups of a mesh of tensor, context, data, pipeline and expert parallel ranks.
#ifndef TANDEM_COMMON_PARALLEL_MEGATRON_PARALLEL_MESH_H_
#define TANDEM_COMMON_PARALLEL_MEGATRON_PARALLEL_MESH_H_

#include <memory>
#include <vector>

#include "common/parallel/megatron/mesh_shape.h"
#include "common/ranks/communicator.h"

namespace tandem::parallel {

// Lists of ranks for Communicator::Split. Every rank is in one group of each kind; only
// EmbeddingGroups leaves ranks out.
using MeshGroups = std::vector<std::vector<int>>;
MeshGroups TensorGroups(const MeshShape& shape);
MeshGroups ContextGroups(const MeshShape& shape);
MeshGroups PipelineGroups(const MeshShape& shape);
// Tensor and context ranks of one replica and stage, the context coordinate changing first: in the
// order of the rows of the vocabulary that they compute.
MeshGroups OutputGroups(const MeshShape& shape);
// Context and data ranks, which hold the same parameters, but for experts.
MeshGroups GradientGroups(const MeshShape& shape);
// Those of them that hold different experts, and those that hold the same ones.
MeshGroups ExpertGroups(const MeshShape& shape);
MeshGroups ExpertGradientGroups(const MeshShape& shape);
// All ranks of a stage.
MeshGroups StageGroups(const MeshShape& shape);
// The first and the last stage of each pipeline of at least two.
MeshGroups EmbeddingGroups(const MeshShape& shape);

// This rank's groups.
struct ParallelMesh {
  // Collective over the world, whose size is that of the shape.
  ParallelMesh(const MeshShape& shape, ranks::Communicator& world);

  const MeshShape shape;
  const MeshCoordinates at;
  const std::shared_ptr<ranks::Communicator> tensor, context, output, gradient;
  // Without expert parallelism: the rank alone, and `gradient`.
  const std::shared_ptr<ranks::Communicator> expert, expert_gradient;
  // The ranks whose passes wait for each other within a stage: those of `output`, or with expert
  // parallelism all of the stage.
  const std::shared_ptr<ranks::Communicator> coupled;
  // The process groups of a pipeline: one sends hidden states forward, one sends their gradients
  // back, and two more do the same between the last stage and the first. No two ranks of a group
  // send to each other, which NCCL would have to be told in one call.
  const std::shared_ptr<ranks::Communicator> forward, backward, forward_wrap, backward_wrap;
  const std::shared_ptr<ranks::Communicator> embedding;  // null on stages in between
};

}  // namespace tandem::parallel

#endif  // TANDEM_COMMON_PARALLEL_MEGATRON_PARALLEL_MESH_H_
