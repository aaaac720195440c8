// The memory of a model's parameters, one buffer for each block of a pass, and the linear maps over
// it.
#ifndef TANDEM_COMMON_MODEL_PARAMETER_STORE_H_
#define TANDEM_COMMON_MODEL_PARAMETER_STORE_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/model/parameter.h"
#include "common/ops/linear_weight.h"

namespace tandem {

class ParameterStore {
 public:
  // Of the declared parameters, uninitialised. `trainable` has one entry per parameter; an empty
  // one means a model that only infers. INVALID_ARGUMENT for "placement.shard_*", and for a size
  // that does not divide by the shards. `without_memory`: whoever holds blocks only some of the
  // time gives their buffers memory (common/tensor/tensor_memory.h).
  static absl::StatusOr<std::unique_ptr<ParameterStore>> Create(
      const std::vector<ParameterSpec>& specs, const std::vector<bool>& trainable,
      const Placement& placement, bool without_memory = false);

  // In the order of their declaration.
  const std::vector<Parameter>& parameters() const { return parameters_; }
  // Flat: all parameters of a block are views of it, each (or each stack of them) aligned to 64
  // bytes. Empty for a block that is not held.
  const std::vector<at::Tensor>& block_buffers() const { return block_buffers_; }
  // nullptr where no such parameter is declared.
  const Parameter* Find(const std::string& name) const;

  // For the model that is being wired. The value of a declared parameter; undefined where there is
  // none, or where its block is not held.
  at::Tensor Take(const std::string& name);
  // The maps "<name>.weight" (with "<name>.bias" where declared) of one input, stacked in one
  // buffer. A single one that was taken before is shared. Their block is held. Lives as long as the
  // store.
  const ops::LinearWeight& TakeLinear(const std::vector<std::string>& names);

  // To be called after values have changed, before the next forward.
  void OnWeightsChanged();

 private:
  explicit ParameterStore(const Placement& placement) : placement_(placement) {}

  void AllocateBlocks(bool without_memory);
  Parameter* FindMutable(const std::string& name);
  // Gives the parameters of those names, in order, one buffer; returns it.
  at::Tensor Allocate(const std::vector<std::string>& names);

  const Placement placement_;
  bool training_ = false;
  std::vector<Parameter> parameters_;
  std::vector<at::Tensor> block_buffers_;
  std::vector<int64_t> taken_;                    // of each buffer
  std::deque<ops::LinearWeight> linear_weights_;  // never moves what was handed out
};

}  // namespace tandem

#endif  // TANDEM_COMMON_MODEL_PARAMETER_STORE_H_
