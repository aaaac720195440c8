// The coordinates of a rank in a mesh of tensor, context, data and pipeline parallel ranks, and in
// groups of expert parallel ranks. No torch.
#ifndef TANDEM_COMMON_PARALLEL_MEGATRON_MESH_SHAPE_H_
#define TANDEM_COMMON_PARALLEL_MEGATRON_MESH_SHAPE_H_

namespace tandem::parallel {

struct MeshCoordinates {
  int tensor = 0, context = 0, data = 0, pipeline = 0;
};

// The size of each dimension. Ranks are in the order of Megatron-LM: from one rank to the next the
// tensor coordinate changes first, then context, data and pipeline.
//
// The context and data ranks that hold the same dense parameters, `context` x `data` of them in
// that order, divide into groups of `expert` consecutive ranks, whose members hold different
// experts.
struct MeshShape {
  int tensor = 1, context = 1, data = 1, pipeline = 1;
  int expert = 1;  // divides context x data

  int size() const { return tensor * context * data * pipeline; }
  MeshCoordinates Coordinates(int rank) const;
  int Rank(const MeshCoordinates& at) const;
  // Returns the place of a rank among those that hold different experts.
  int ExpertRank(const MeshCoordinates& at) const {
    return (at.context + context * at.data) % expert;
  }
  // Returns the first rank, at tensor coordinate and stage 0, that holds the experts of that place.
  MeshCoordinates FirstOfExperts(int expert_rank) const {
    return {.tensor = 0,
            .context = expert_rank % context,
            .data = expert_rank / context,
            .pipeline = 0};
  }
};

}  // namespace tandem::parallel

#endif  // TANDEM_COMMON_PARALLEL_MEGATRON_MESH_SHAPE_H_
