// One parameter of a model, and where it lives.
#ifndef TANDEM_COMMON_MODEL_PARAMETERS_PARAMETER_H_
#define TANDEM_COMMON_MODEL_PARAMETERS_PARAMETER_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>

#include "common/kernels/weight_format.h"
#include "common/model/config/parameter_spec.h"
#include "common/model/parameters/expert_shard.h"
#include "common/model/parameters/shard.h"
#include "common/ops/experts/expert_parallel_group.h"
#include "common/ops/products/packed_weight.h"
#include "common/ops/shards/tensor_parallel_group.h"

namespace tandem {

// The device, type and shards of a model's parameters in this process.
struct Placement {
  at::Device device = at::kCPU;
  // The type of the computation, float32 or bfloat16. Parameters that do not train are stored in
  // it; those that train are stored in float32, and linear maps multiply a copy.
  at::ScalarType dtype = at::kFloat;
  // The storage of the linear maps, the embedding and the head, but for those that train. A packed
  // format is for a model that only infers, that is frozen or whose adapters train, on the CPU in
  // float32 (`dtype`); norms and biases are then float32.
  kernels::WeightFormat weight_format = kernels::WeightFormat::kDense;
  // The type whose values passes read of the same matrices: float32, or bfloat16 for the bits of a
  // model that packs them in bfloat16. A model that trains keeps float32 masters and reads rounded
  // copies; one that only infers is rounded itself. bfloat16 needs dense matrices on the CPU and
  // `dtype` float32; norms and biases are not rounded.
  at::ScalarType weight_dtype = at::kFloat;
  // bfloat16: linear maps and the head round their inputs (ops::LinearWeight), but for those that
  // `weight_dtype` does not round. Needs weights in bfloat16 (`weight_format`, `weight_dtype`) and
  // the CPU's own kernels.
  at::ScalarType activation_dtype = at::kFloat;
  // The tensor-parallel shard that this process holds of every parameter with a shard axis.
  int64_t shard_index = 0;
  int64_t shard_count = 1;
  // The ranks that hold the shards, this one as rank `shard_index`. A process without them can hold
  // its shard and not compute with it.
  std::shared_ptr<ops::TensorParallelGroup> shard_group = nullptr;
  // The experts that this process holds, in equal shards over the ranks of `expert_group`, between
  // which tokens travel. With ExpertShard::whole the ranks of shard_group hold them instead, which
  // have all tokens; such a model only infers.
  ExpertShard experts = {};
  std::shared_ptr<ops::ExpertParallelGroup> expert_group = nullptr;
  // The ranks that compute the same values of a value head; nullptr: those of shard_group.
  std::shared_ptr<ops::TensorParallelGroup> output_group = nullptr;
  // Number of equal shards into which each flat buffer can be divided (the ZeRO world size).
  int64_t buffer_shards = 1;
  // Whether this process holds the parameters of a block; nullptr: it holds all. With a tied head,
  // a process that holds the last block also holds block 0, the embedding.
  std::function<bool(int64_t block)> holds_block = nullptr;

  bool Holds(int64_t block) const { return holds_block == nullptr || holds_block(block); }
  bool Holds(const ParameterSpec& spec) const { return Holds(spec.block) && spec.IsIn(experts); }
};

struct Parameter {
  ParameterSpec spec;
  Shard shard;
  bool trainable = false;
  // This process's shard, a leaf that requires a gradient if trainable. Undefined if the process
  // does not hold the block or the expert, or holds the parameter packed.
  at::Tensor value;
  // The flat buffer in which the value lies: an index of Model::BlockBuffers. kOwnMemory for what
  // no gradient changes (ParameterSpec::trains): float32 whatever the type of the others, as
  // `transformers` keeps it, and whole on every rank that holds the block.
  int64_t buffer = 0;
  static constexpr int64_t kOwnMemory = -1;
  // With a packed Placement::weight_format: the matrix in which this process's shard has the rows
  // from `packed_row` on. nullptr for norms and biases.
  std::shared_ptr<const ops::PackedWeight> packed = nullptr;
  int64_t packed_row = 0;
  // Whether a pass reads `value` itself, also where linear maps have copies in the type of the
  // computation: norms and the embedding.
  bool read_as_master = false;

  // Whether passes read it rounded to bfloat16 (Placement::weight_dtype).
  bool rounded = false;

  bool has_own_memory() const { return buffer == kOwnMemory; }
  // Whether a model of that format has it packed, in this process or in another one.
  bool IsPackedIn(kernels::WeightFormat format) const {
    return !trainable && IsPacked(spec, format);
  }
  // Whether this process holds a shard of it.
  bool held() const { return value.defined() || packed != nullptr; }
  // Copies this process's shard of `whole`, of any device and floating-point type, in. Needs
  // held().
  void CopyFrom(const at::Tensor& whole, ops::PackThreads threads = ops::PackThreads::kAll) const;
  // Returns the values of this process's shard that a pass computes with: `value`, or a rounded or
  // unpacked copy in float32. Needs held().
  at::Tensor ComputedValue() const;
};

}  // namespace tandem

#endif  // TANDEM_COMMON_MODEL_PARAMETERS_PARAMETER_H_
