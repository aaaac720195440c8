#include "common/parallel/megatron/mesh_shape.h"

namespace tandem::parallel {

MeshCoordinates MeshShape::Coordinates(int rank) const {
  return {.tensor = rank % tensor,
          .context = rank / tensor % context,
          .data = rank / (tensor * context) % data,
          .pipeline = rank / (tensor * context * data)};
}

int MeshShape::Rank(const MeshCoordinates& at) const {
  return at.tensor + tensor * (at.context + context * (at.data + data * at.pipeline));
}

}  // namespace tandem::parallel
