// The memory of a model's parameters, one buffer for each block of a pass, and the linear maps over
// it.
#ifndef TANDEM_COMMON_MODEL_PARAMETERS_PARAMETER_STORE_H_
#define TANDEM_COMMON_MODEL_PARAMETERS_PARAMETER_STORE_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "absl/status/statusor.h"
#include "common/model/config/lora.h"
#include "common/model/parameters/parameter.h"
#include "common/ops/linear/embedding_weight.h"
#include "common/ops/linear/linear_weight.h"

namespace tandem {

// Values of parameters of a model that infers, in memory of their own.
struct ParameterSet {
  std::vector<Parameter> parameters;      // those of the model, but for the memory of their values
  std::vector<at::Tensor> block_buffers;  // see ParameterStore::block_buffers; some undefined
  std::vector<std::shared_ptr<ops::PackedWeight>> packed;
};

class ParameterStore {
 public:
  // Creates the memory of the declared parameters, uninitialised; that of packed matrices comes
  // when they are taken. `trainable` has one entry per parameter; an empty one means a model that
  // only infers. INVALID_ARGUMENT for "placement.shard_*". With `without_memory` the caller gives a
  // block's buffer memory while it needs the block (common/tensor/aten/tensor_memory.h). `lora`:
  // of the adapters, where the parameters have some (WithAdapters).
  static absl::StatusOr<std::unique_ptr<ParameterStore>> Create(
      const std::vector<ParameterSpec>& specs, const std::vector<bool>& trainable,
      const Placement& placement, bool without_memory = false, const LoraOptions& lora = {});

  // Parameters in the order of their declaration.
  const std::vector<Parameter>& parameters() const { return parameters_; }
  // Flat: all parameters of a block are views of it, each (or each stack of them) aligned to 64
  // bytes. Empty for a block that is not held. Packed matrices are not in them, nor what has memory
  // of its own (Parameter::buffer). Where experts are
  // sharded, those of block b have a buffer of their own, at the number of blocks + b, because
  // other ranks hold the same values of it. Behind these come as many buffers again for adapters,
  // which train while what they adapt does not.
  const std::vector<at::Tensor>& block_buffers() const { return block_buffers_; }
  // Buffers of the same layout in the type of the computation, which linear maps multiply with; the
  // caller fills them. Only where `without_memory` and that type is not float32; else empty.
  const std::vector<at::Tensor>& compute_buffers() const { return compute_buffers_; }
  // Returns nullptr for a name that is not declared.
  const Parameter* Find(const std::string& name) const;

  // Backbones call the functions Take… while they are constructed. Returns the value of a declared
  // parameter that is no matrix; undefined if none has the name, or its block is not held.
  at::Tensor Take(const std::string& name);
  // Returns the table of that name; an empty one if its block is not held.
  ops::EmbeddingWeight TakeEmbedding(const std::string& name);
  // Returns the linear maps "<name>.weight" (with "<name>.bias" where declared) of one input,
  // stacked in one buffer. A single map that was taken before is shared. They must be held.
  // The result has the maps' adapters, and lives as long as the store.
  const ops::LinearWeight& TakeLinear(const std::vector<std::string>& names);

  // Takes the memory of a second set of values, uninitialised: of all parameters, or where there
  // are adapters of these alone. Only reads the layout of the store, and so runs beside forward
  // passes. Needs a store of a model that infers and has its memory.
  ParameterSet NewSet() const;
  // Exchanges the memory of the values with that of a set that NewSet returned. No value is read.
  void Swap(ParameterSet& set);

  // Call it after values have changed, before the next forward pass. Rounds the values of a model
  // that only infers with a `weight_dtype` of bfloat16.
  void OnWeightsChanged();

 private:
  ParameterStore(const Placement& placement, const LoraOptions& lora)
      : placement_(placement), lora_(lora) {}

  void AllocateBlocks();
  Parameter* FindMutable(const std::string& name);
  // Returns the view of a compute buffer at the place of `stacked` in the buffer of that index.
  at::Tensor ComputeView(int64_t buffer, const at::Tensor& stacked) const;
  // Whether linear maps have copies of the experts in `buffer`, on a GPU: there one operation
  // multiplies by all of a layer, which must lie at equal distances (ops::AreStacked).
  bool StacksCopies(int64_t buffer) const;
  // Whether a parameter is stored packed: in a packed format the matrices that do not train are.
  bool IsPacked(const Parameter& parameter) const;
  // Whether linear maps and the embedding read rounded copies of their values. In a model that only
  // infers the values are rounded themselves, and the caller of a store without memory rounds what
  // it gives to a block.
  bool HasRoundedCopies() const;
  // Returns the shape of the stack of the parameters of those names, which must not be taken yet.
  std::vector<int64_t> StackedShape(const std::vector<std::string>& names) const;
  // Gives the parameters of those names, in order, one range of a buffer; returns it.
  at::Tensor Allocate(const std::vector<std::string>& names);
  // Returns the maps of TakeLinear, without adapters.
  ops::LinearWeight& TakeMaps(const std::vector<std::string>& names);
  // Gives them one packed matrix.
  std::shared_ptr<const ops::PackedWeight> AllocatePacked(const std::vector<std::string>& names);

  const Placement placement_;
  const LoraOptions lora_;
  bool training_ = false, without_memory_ = false;
  std::vector<Parameter> parameters_;
  std::unordered_map<std::string, size_t> indices_;  // of parameters_, by name
  std::vector<at::Tensor> block_buffers_, compute_buffers_;
  std::vector<at::Tensor> copy_buffers_;  // those of StacksCopies, with the layout of the others
  std::vector<std::shared_ptr<ops::PackedWeight>> packed_;
  std::vector<int64_t> taken_;                    // of each buffer
  std::deque<ops::LinearWeight> linear_weights_;  // never moves what was handed out
};

}  // namespace tandem

#endif  // TANDEM_COMMON_MODEL_PARAMETERS_PARAMETER_STORE_H_
