// The ranks of a world as a mesh of tensor, context, data and pipeline parallel ones.
#ifndef TANDEM_COMMON_PARALLEL_PARALLEL_MESH_H_
#define TANDEM_COMMON_PARALLEL_PARALLEL_MESH_H_

#include <memory>
#include <vector>

#include "common/parallel/communicator.h"

namespace tandem::parallel {

struct MeshCoordinates {
  int tensor = 0, context = 0, data = 0, pipeline = 0;
};

// Sizes, and the order of Megatron-LM: from one rank to the next the tensor coordinate changes
// first, then context, data and pipeline.
struct MeshShape {
  int tensor = 1, context = 1, data = 1, pipeline = 1;

  int size() const { return tensor * context * data * pipeline; }
  MeshCoordinates Coordinates(int rank) const;
  int Rank(const MeshCoordinates& at) const;
};

// Lists of ranks for Communicator::Split. Every rank is in one group of each kind, but for the
// last.
using MeshGroups = std::vector<std::vector<int>>;
MeshGroups TensorGroups(const MeshShape& shape);
MeshGroups ContextGroups(const MeshShape& shape);
MeshGroups PipelineGroups(const MeshShape& shape);
// Tensor and context ranks of one replica and stage, the context coordinate changing first: in the
// order of the rows of the vocabulary that they compute.
MeshGroups OutputGroups(const MeshShape& shape);
// Context and data ranks, which hold the same parameters.
MeshGroups GradientGroups(const MeshShape& shape);
// The first and the last stage of each pipeline of at least two.
MeshGroups EmbeddingGroups(const MeshShape& shape);

// This rank's groups.
struct ParallelMesh {
  // Collective over the world, whose size is that of the shape.
  ParallelMesh(const MeshShape& shape, Communicator& world);

  const MeshShape shape;
  const MeshCoordinates at;
  const std::shared_ptr<Communicator> tensor, context, output, gradient;
  // Of the stages of a pipeline, one for what goes forward and one for what goes back, and the same
  // for what goes between the last stage and the first: in none of them do two ranks send to each
  // other, which NCCL would have to be told in one call.
  const std::shared_ptr<Communicator> forward, backward, forward_wrap, backward_wrap;
  const std::shared_ptr<Communicator> embedding;  // null on stages in between
};

}  // namespace tandem::parallel

#endif  // TANDEM_COMMON_PARALLEL_PARALLEL_MESH_H_
