// One parameter of a model, and where it lives.
#ifndef TANDEM_COMMON_MODEL_PARAMETER_H_
#define TANDEM_COMMON_MODEL_PARAMETER_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>

#include "common/model/parameter_spec.h"
#include "common/ops/tensor_parallel_group.h"

namespace tandem {

// Where a model's parameters live.
struct Placement {
  at::Device device = at::kCPU;
  // Of the computation (float32 or bfloat16). What does not train is stored in it; what trains is
  // stored in float32 and computed with a copy.
  at::ScalarType dtype = at::kFloat;
  // The part that this process holds of every parameter that has a shard axis.
  int64_t shard_index = 0;
  int64_t shard_count = 1;
  // The ranks that hold the parts, this one as rank `shard_index`. Without them a part can be held
  // but not computed with.
  std::shared_ptr<ops::TensorParallelGroup> shard_group = nullptr;
  // The ranks that compute the same values of a value head; nullptr: those of shard_group.
  std::shared_ptr<ops::TensorParallelGroup> output_group = nullptr;
  // Into how many equal parts the buffer of a block can be cut.
  int64_t buffer_parts = 1;
  // The blocks of a pass whose parameters this process holds; nullptr: all. One that holds the last
  // block of a model with a tied head holds block 0 too.
  std::function<bool(int64_t block)> holds_block = nullptr;

  bool Holds(int64_t block) const { return holds_block == nullptr || holds_block(block); }
};

// The part of a tensor that one process holds: slice `index` of `count` equal ones along `axis`.
struct Shard {
  int64_t axis = 0;
  int64_t index = 0;
  int64_t count = 1;

  // A view of that part of a whole tensor.
  at::Tensor Of(const at::Tensor& whole) const {
    if (count == 1) return whole;
    const int64_t size = whole.size(axis) / count;
    return whole.narrow(axis, index * size, size);
  }
};

struct Parameter {
  ParameterSpec spec;
  Shard shard;
  bool trainable = false;
  // This process's part, a leaf that requires a gradient if trainable. Undefined where the process
  // does not hold the block.
  at::Tensor value;
};

}  // namespace tandem

#endif  // TANDEM_COMMON_MODEL_PARAMETER_H_
