#include "common/model/parameters/parameter_store.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/errors/error.h"
#include "common/ops/products/bfloat16_rounding.h"
#include "common/tensor/aten/tensor_memory.h"

namespace tandem {
namespace {

// Returns the number of values that `numel` take in a buffer, rounded up so that what follows is
// aligned.
int64_t Aligned(int64_t numel, int64_t shards = 1) {
  const int64_t values = 32 * shards;  // 64 bytes of bf16
  return (numel + values - 1) / values * values;
}

}  // namespace

absl::StatusOr<std::unique_ptr<ParameterStore>> ParameterStore::Create(
    const std::vector<ParameterSpec>& specs, const std::vector<bool>& trainable,
    const Placement& placement, bool without_memory, const LoraOptions& lora) {
  if (placement.shard_count < 1) {
    return InvalidField("placement.shard_count", "must be at least 1");
  }
  if (placement.shard_index < 0 || placement.shard_index >= placement.shard_count) {
    return InvalidField("placement.shard_index",
                        absl::StrCat("must be in [0, ", placement.shard_count, ")"));
  }
  std::unique_ptr<ParameterStore> store(new ParameterStore(placement, lora));
  store->training_ = !trainable.empty();
  store->without_memory_ = without_memory;
  int64_t num_blocks = 0;
  bool has_experts = false;
  for (const ParameterSpec& spec : specs) {
    num_blocks = std::max(num_blocks, spec.block + 1);
    has_experts = has_experts || spec.expert.has_value();
  }
  const bool shards_experts = has_experts && placement.experts.count > 1;
  const int64_t num_buffers = num_blocks * (shards_experts ? 2 : 1);
  for (size_t i = 0; i < specs.size(); ++i) {
    Parameter parameter = {
        .spec = specs[i], .shard = {}, .trainable = store->training_ && trainable[i], .value = {}};
    parameter.rounded = placement.weight_dtype == at::kBFloat16 && specs[i].packs();
    parameter.shard =
        specs[i].ShardOf(placement.shard_index, placement.shard_count, placement.experts);
    const bool apart = specs[i].expert.has_value() && shards_experts;
    parameter.buffer = specs[i].trains ? specs[i].block + (apart ? num_blocks : 0) +
                                             (specs[i].adapts ? num_buffers : 0)
                                       : Parameter::kOwnMemory;
    store->indices_.emplace(specs[i].name, i);
    store->parameters_.push_back(std::move(parameter));
  }
  store->AllocateBlocks();
  return store;
}

void ParameterStore::AllocateBlocks() {
  std::vector<int64_t> sizes;
  for (const Parameter& parameter : parameters_) {
    if (parameter.has_own_memory()) continue;
    const auto buffer = static_cast<size_t>(parameter.buffer);
    sizes.resize(std::max(sizes.size(), buffer + 1));
    if (!placement_.Holds(parameter.spec) || IsPacked(parameter)) continue;
    sizes[buffer] += Aligned(c10::multiply_integers(parameter.shard.ShapeOf(parameter.spec.shape)));
  }
  const auto options =
      at::device(placement_.device).dtype(training_ ? at::kFloat : placement_.dtype);
  for (const int64_t size : sizes) {
    const int64_t numel = Aligned(size, placement_.buffer_shards);
    block_buffers_.push_back(without_memory_ ? EmptyWithoutMemory(numel, options)
                                             : at::empty({numel}, options));
    if (without_memory_ && options.dtype() != placement_.dtype) {
      compute_buffers_.push_back(EmptyWithoutMemory(numel, options.dtype(placement_.dtype)));
    }
    const bool stacks = StacksCopies(std::ssize(copy_buffers_));
    copy_buffers_.push_back(stacks ? at::empty({numel}, options.dtype(placement_.dtype))
                                   : at::Tensor());
  }
  taken_.resize(sizes.size());
}

bool ParameterStore::StacksCopies(int64_t buffer) const {
  if (!training_ || without_memory_ || placement_.dtype == at::kFloat ||
      placement_.device.is_cpu()) {
    return false;
  }
  return std::ranges::any_of(parameters_, [&](const Parameter& parameter) {
    return parameter.buffer == buffer && parameter.spec.expert.has_value();
  });
}

const Parameter* ParameterStore::Find(const std::string& name) const {
  const auto found = indices_.find(name);
  return found == indices_.end() ? nullptr : &parameters_[found->second];
}

Parameter* ParameterStore::FindMutable(const std::string& name) {
  return const_cast<Parameter*>(Find(name));
}

bool ParameterStore::IsPacked(const Parameter& parameter) const {
  return parameter.IsPackedIn(placement_.weight_format);
}

bool ParameterStore::HasRoundedCopies() const {
  return placement_.weight_dtype == at::kBFloat16 && training_ && !without_memory_;
}

std::vector<int64_t> ParameterStore::StackedShape(const std::vector<std::string>& names) const {
  std::vector<int64_t> stacked;
  for (const std::string& name : names) {
    const Parameter* parameter = Find(name);
    TORCH_CHECK(parameter != nullptr && !parameter->held(), "parameter ", name,
                " is not declared or already taken");
    const std::vector<int64_t> shape = parameter->shard.ShapeOf(parameter->spec.shape);
    if (stacked.empty()) {
      stacked = shape;
    } else {
      stacked[0] += shape[0];
    }
  }
  return stacked;
}

std::shared_ptr<const ops::PackedWeight> ParameterStore::AllocatePacked(
    const std::vector<std::string>& names) {
  const std::vector<int64_t> shape = StackedShape(names);
  std::shared_ptr<const ops::PackedWeight> packed = packed_.emplace_back(
      std::make_shared<ops::PackedWeight>(placement_.weight_format, shape[0], shape[1]));
  int64_t row = 0;
  for (const std::string& name : names) {
    Parameter& parameter = *FindMutable(name);
    parameter.packed = packed;
    parameter.packed_row = row;
    row += parameter.shard.ShapeOf(parameter.spec.shape)[0];
  }
  return packed;
}

at::Tensor ParameterStore::Allocate(const std::vector<std::string>& names) {
  const at::NoGradGuard no_grad;
  const std::vector<int64_t> stacked_shape = StackedShape(names);
  const auto buffer = static_cast<size_t>(Find(names[0])->buffer);
  const int64_t numel = c10::multiply_integers(stacked_shape);
  at::Tensor stacked =
      block_buffers_[buffer].narrow(0, taken_[buffer], numel).view(stacked_shape).detach();
  taken_[buffer] += Aligned(numel);
  int64_t begin = 0;
  for (const std::string& name : names) {
    Parameter& parameter = *FindMutable(name);
    const int64_t rows = parameter.shard.ShapeOf(parameter.spec.shape)[0];
    parameter.value = stacked.narrow(0, begin, rows).detach();
    parameter.value.set_requires_grad(parameter.trainable);
    begin += rows;
  }
  return stacked;
}

at::Tensor ParameterStore::ComputeView(int64_t buffer, const at::Tensor& stacked) const {
  const std::vector<at::Tensor>& buffers =
      compute_buffers_.empty() ? copy_buffers_ : compute_buffers_;
  return buffers[static_cast<size_t>(buffer)]
      .narrow(0, stacked.storage_offset(), stacked.numel())
      .view(stacked.sizes())
      .detach();
}

at::Tensor ParameterStore::Take(const std::string& name) {
  const Parameter* const parameter = Find(name);
  if (parameter == nullptr || !placement_.Holds(parameter->spec.block)) return {};
  if (parameter->has_own_memory()) {
    FindMutable(name)->value = at::empty(parameter->shard.ShapeOf(parameter->spec.shape),
                                         at::device(placement_.device).dtype(at::kFloat));
    return parameter->value;
  }
  Allocate({name});
  FindMutable(name)->read_as_master = true;
  return parameter->value;
}

ops::EmbeddingWeight ParameterStore::TakeEmbedding(const std::string& name) {
  const Parameter* const parameter = Find(name);
  if (parameter == nullptr || !IsPacked(*parameter)) {
    return ops::EmbeddingWeight(Take(name), HasRoundedCopies());
  }
  if (!placement_.Holds(parameter->spec.block)) return {};
  return ops::EmbeddingWeight(AllocatePacked({name}));
}

const ops::LinearWeight& ParameterStore::TakeLinear(const std::vector<std::string>& names) {
  ops::LinearWeight& maps = TakeMaps(names);
  ops::LowRankAdapter adapter = {.rank = lora_.rank};
  std::vector<std::string> a_names;
  int64_t column = 0;
  for (const std::string& name : names) {
    const Parameter& weight = *Find(name + ".weight");
    const int64_t width = weight.shard.ShapeOf(weight.spec.shape)[0];
    if (Find(name + ".lora_A.weight") != nullptr) {
      a_names.push_back(name + ".lora_A");
      adapter.maps.push_back(
          {.column = column, .width = width, .b = &TakeMaps({name + ".lora_B"})});
    }
    column += width;
  }
  if (a_names.empty()) return maps;
  adapter.a = &TakeMaps(a_names);
  adapter.scale = lora_.scale();
  maps.SetAdapter(std::move(adapter));
  return maps;
}

ops::LinearWeight& ParameterStore::TakeMaps(const std::vector<std::string>& names) {
  std::vector<std::string> weight_names, bias_names;
  for (const std::string& name : names) {
    weight_names.push_back(name + ".weight");
    if (Find(name + ".bias") != nullptr) bias_names.push_back(name + ".bias");
  }
  const Parameter* const shared = names.size() == 1 ? Find(weight_names[0]) : nullptr;
  const auto values = [&](const std::vector<std::string>& of) {
    std::vector<at::Tensor> result;
    for (const std::string& name : of) result.push_back(Find(name)->value);
    return result;
  };
  const auto take_bias = [&] { return bias_names.empty() ? at::Tensor() : Allocate(bias_names); };
  const Parameter* const first = Find(weight_names[0]);
  TORCH_CHECK(first != nullptr, "parameter ", weight_names[0], " is not declared");
  const bool rounds_inputs = placement_.activation_dtype == at::kBFloat16 && first->spec.packs();
  if (IsPacked(*first)) {
    const bool taken = shared != nullptr && shared->packed != nullptr;
    const auto packed = taken ? shared->packed : AllocatePacked(weight_names);
    const at::Tensor bias = take_bias();
    return linear_weights_.emplace_back(packed, bias, values(bias_names), rounds_inputs);
  }
  const at::Tensor stacked = shared != nullptr && shared->value.defined() ? shared->value.detach()
                                                                          : Allocate(weight_names);
  const at::Tensor bias = take_bias();
  const int64_t buffer = first->buffer;
  if (!compute_buffers_.empty()) {
    return linear_weights_.emplace_back(stacked, bias, values(weight_names), values(bias_names),
                                        ComputeView(buffer, stacked),
                                        bias.defined() ? ComputeView(buffer, bias) : at::Tensor());
  }
  // Frozen maps, whose values are rounded themselves, have a copy in bf16, too.
  return linear_weights_.emplace_back(
      stacked, bias, values(weight_names), values(bias_names),
      rounds_inputs ? at::kBFloat16 : placement_.dtype,
      rounds_inputs || (HasRoundedCopies() && first->rounded),
      StacksCopies(buffer) ? ComputeView(buffer, stacked) : at::Tensor());
}

ParameterSet ParameterStore::NewSet() const {
  TORCH_CHECK(!training_ && compute_buffers_.empty(),
              "parameters that train have one set of values");
  TORCH_CHECK(placement_.weight_dtype == at::kFloat, "a second set of values is not rounded");
  const at::NoGradGuard no_grad;
  ParameterSet set = {.parameters = {}, .block_buffers = {}, .packed = {}};
  set.block_buffers.resize(block_buffers_.size());
  for (const Parameter& parameter : parameters_) {
    if (lora_.enabled() && !parameter.spec.adapts) continue;
    set.parameters.push_back(parameter);
    if (parameter.has_own_memory()) continue;
    const auto buffer = static_cast<size_t>(parameter.buffer);
    if (!set.block_buffers[buffer].defined()) {
      set.block_buffers[buffer] = at::empty_like(block_buffers_[buffer]);
    }
  }
  std::map<std::shared_ptr<const ops::PackedWeight>, std::shared_ptr<ops::PackedWeight>> copies;
  for (const auto& packed : packed_) {
    if (lora_.enabled()) break;
    copies[packed] = set.packed.emplace_back(
        std::make_shared<ops::PackedWeight>(packed->format(), packed->out(), packed->in()));
  }
  for (Parameter& parameter : set.parameters) {
    if (parameter.packed != nullptr) parameter.packed = copies.at(parameter.packed);
    const at::Tensor value = parameter.value;
    if (!value.defined()) continue;
    if (parameter.has_own_memory()) {
      parameter.value = at::empty_like(value);
      continue;
    }
    parameter.value = set.block_buffers[static_cast<size_t>(parameter.buffer)].as_strided(
        value.sizes(), value.strides(), value.storage_offset());
  }
  return set;
}

void ParameterStore::Swap(ParameterSet& set) {
  for (size_t i = 0; i < block_buffers_.size(); ++i) {
    if (set.block_buffers[i].defined()) SwapMemory(block_buffers_[i], set.block_buffers[i]);
  }
  for (size_t i = 0; i < set.packed.size(); ++i) packed_[i]->Swap(*set.packed[i]);
  for (Parameter& parameter : set.parameters) {
    if (!parameter.has_own_memory() || !parameter.value.defined()) continue;
    SwapMemory(FindMutable(parameter.spec.name)->value, parameter.value);
  }
}

void ParameterStore::OnWeightsChanged() {
  for (const Parameter& parameter : parameters_) {
    if (training_ || !parameter.rounded || !parameter.value.defined()) continue;
    ops::CopyRounded(parameter.value, parameter.value);
  }
  for (ops::LinearWeight& weight : linear_weights_) weight.OnWeightsChanged();
}

}  // namespace tandem
