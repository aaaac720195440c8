#include "common/parallel/megatron/parallel_mesh.h"

#include <ATen/core/Tensor.h>

#include <map>

namespace tandem::parallel {
namespace {

struct Axis {
  int MeshShape::*size;
  int MeshCoordinates::*at;
};

constexpr Axis kTensor = {&MeshShape::tensor, &MeshCoordinates::tensor};
constexpr Axis kContext = {&MeshShape::context, &MeshCoordinates::context};
constexpr Axis kData = {&MeshShape::data, &MeshCoordinates::data};
constexpr Axis kPipeline = {&MeshShape::pipeline, &MeshCoordinates::pipeline};

// Ranks that differ along `axes` alone, of which the first changes first.
MeshGroups GroupsAlong(const MeshShape& shape, const std::vector<Axis>& axes) {
  std::map<int, std::vector<int>> groups;  // by the rank where these axes are at 0
  for (int rank = 0; rank < shape.size(); ++rank) {
    MeshCoordinates first = shape.Coordinates(rank);
    int place = 0, members = 1;
    for (const Axis& axis : axes) {
      place += first.*axis.at * members;
      members *= shape.*axis.size;
      first.*axis.at = 0;
    }
    std::vector<int>& group = groups[shape.Rank(first)];
    group.resize(static_cast<size_t>(members));
    group[static_cast<size_t>(place)] = rank;
  }
  MeshGroups result;
  for (auto& [rank, group] : groups) result.push_back(std::move(group));
  return result;
}

const MeshShape& Checked(const MeshShape& shape, const ranks::Communicator& world) {
  TORCH_CHECK(shape.size() == world.size(), "a mesh of ", shape.size(), " ranks, but there are ",
              world.size());
  return shape;
}

}  // namespace

MeshGroups TensorGroups(const MeshShape& shape) { return GroupsAlong(shape, {kTensor}); }

MeshGroups ContextGroups(const MeshShape& shape) { return GroupsAlong(shape, {kContext}); }

MeshGroups PipelineGroups(const MeshShape& shape) { return GroupsAlong(shape, {kPipeline}); }

MeshGroups OutputGroups(const MeshShape& shape) { return GroupsAlong(shape, {kContext, kTensor}); }

MeshGroups GradientGroups(const MeshShape& shape) { return GroupsAlong(shape, {kContext, kData}); }

MeshGroups ExpertGroups(const MeshShape& shape) {
  MeshGroups groups;
  for (const std::vector<int>& holders : GradientGroups(shape)) {
    for (auto first = holders.begin(); first != holders.end(); first += shape.expert) {
      groups.emplace_back(first, first + shape.expert);
    }
  }
  return groups;
}

MeshGroups ExpertGradientGroups(const MeshShape& shape) {
  MeshGroups groups;
  for (const std::vector<int>& holders : GradientGroups(shape)) {
    const auto experts = static_cast<size_t>(shape.expert), first = groups.size();
    groups.resize(first + experts);
    for (size_t i = 0; i < holders.size(); ++i) groups[first + i % experts].push_back(holders[i]);
  }
  return groups;
}

MeshGroups StageGroups(const MeshShape& shape) {
  return GroupsAlong(shape, {kTensor, kContext, kData});
}

MeshGroups EmbeddingGroups(const MeshShape& shape) {
  MeshGroups groups;
  if (shape.pipeline == 1) return groups;
  for (const std::vector<int>& stages : PipelineGroups(shape)) {
    groups.push_back({stages.front(), stages.back()});
  }
  return groups;
}

ParallelMesh::ParallelMesh(const MeshShape& of, ranks::Communicator& world)
    : shape(Checked(of, world)),
      at(shape.Coordinates(world.rank())),
      tensor(world.Split("tensor parallel", TensorGroups(shape))),
      context(world.Split("context parallel", ContextGroups(shape))),
      output(world.Split("output layer", OutputGroups(shape))),
      gradient(world.Split("gradients", GradientGroups(shape))),
      expert(world.Split("expert parallel", ExpertGroups(shape))),
      expert_gradient(shape.expert == 1
                          ? gradient
                          : world.Split("gradients of experts", ExpertGradientGroups(shape))),
      coupled(shape.expert == 1 ? output : world.Split("stage", StageGroups(shape))),
      forward(world.Split("pipeline forward", PipelineGroups(shape))),
      backward(world.Split("pipeline backward", PipelineGroups(shape))),
      forward_wrap(world.Split("pipeline forward, last to first", PipelineGroups(shape))),
      backward_wrap(world.Split("pipeline backward, first to last", PipelineGroups(shape))),
      embedding(world.Split("embeddings", EmbeddingGroups(shape))) {}

}  // namespace tandem::parallel
