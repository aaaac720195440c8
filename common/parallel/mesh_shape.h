// The coordinates of a rank in a mesh of tensor, context, data and pipeline parallel ranks. No
// torch.
#ifndef TANDEM_COMMON_PARALLEL_MESH_SHAPE_H_
#define TANDEM_COMMON_PARALLEL_MESH_SHAPE_H_

namespace tandem::parallel {

struct MeshCoordinates {
  int tensor = 0, context = 0, data = 0, pipeline = 0;
};

// The size of each dimension. Ranks are in the order of Megatron-LM: from one rank to the next the
// tensor coordinate changes first, then context, data and pipeline.
struct MeshShape {
  int tensor = 1, context = 1, data = 1, pipeline = 1;

  int size() const { return tensor * context * data * pipeline; }
  MeshCoordinates Coordinates(int rank) const;
  int Rank(const MeshCoordinates& at) const;
};

}  // namespace tandem::parallel

#endif  // TANDEM_COMMON_PARALLEL_MESH_SHAPE_H_
