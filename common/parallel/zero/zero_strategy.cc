#include "common/parallel/zero/zero_strategy.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <utility>

#include "common/base/errors/status_macros.h"
#include "common/ops/products/bfloat16_rounding.h"
#include "common/parallel/held_values.h"
#include "common/parallel/zero/buckets.h"
#include "common/ranks/rank_agreement.h"
#include "common/tensor/aten/catch_torch_errors.h"
#include "common/tensor/aten/tensor_memory.h"

namespace tandem::parallel {
namespace {

// Returns the most micro-batches, of `count`, that one of the ranks runs.
int64_t Rounds(int64_t count, int64_t ranks) { return (count + ranks - 1) / ranks; }

}  // namespace

std::vector<ZeroStrategy::Buffer*> ZeroStrategy::BuffersOf(int64_t block) {
  std::vector<Buffer*> of_block;
  for (int64_t index = block; index < static_cast<int64_t>(buffers_.size());
       index += model_->num_blocks()) {
    of_block.push_back(&buffers_[static_cast<size_t>(index)]);
  }
  return of_block;
}

at::Tensor ZeroStrategy::ShardOf(const at::Tensor& flat) const {
  const int64_t numel = flat.numel() / ranks_->size();
  return flat.narrow(0, ranks_->rank() * numel, numel);
}

absl::Status ZeroStrategy::LoadModel(const std::string& directory, const LoadOptions& options) {
  LoadOptions load = options;
  load.placement.buffer_shards = ranks_->size();
  load.without_memory = shards_parameters();
  TANDEM_ASSIGN_OR_RETURN(model_, Model::Load(directory, load));
  head_block_ = model_->tied() ? 0 : model_->num_blocks() - 1;
  const std::vector<at::Tensor>& all = model_->BlockBuffers();
  for (size_t i = 0; i < all.size(); ++i) {
    Buffer& buffer = buffers_.emplace_back();
    buffer.index = static_cast<int64_t>(i);
    // An alias with its own version counter: autograd does not see gathering.
    buffer.parameters = all[i].variable_data();
    buffer.parameter_shard = shards_parameters()
                                 ? at::zeros({all[i].numel() / ranks_->size()}, all[i].options())
                                 : ShardOf(buffer.parameters);
    buffer.gathered = !shards_parameters();
    if (!shards_parameters()) continue;
    buffer.compute = has_copies() ? model_->ComputeBuffers()[i].variable_data() : buffer.parameters;
    buffer.compute_shard = has_copies()
                               ? at::empty_like(buffer.parameter_shard, buffer.compute.options())
                               : buffer.parameter_shard;
  }
  if (!shards_parameters()) return absl::OkStatus();
  TANDEM_ASSIGN_OR_RETURN(const SourceParameters source, model_->ReadSource());
  return LoadParameters(source.tensors);
}

absl::Status ZeroStrategy::BuildOptimizer(const OptimizerOptions& options) {
  return CatchTorchErrors("cannot build the optimizer", [&]() -> absl::Status {
    std::vector<OptimizerShard> shards;
    for (Buffer& buffer : buffers_) {
      buffer.trains = BufferTrains(*model_, buffer.index);
      if (!buffer.trains) continue;
      MakeGradients(buffer);
      for (OptimizerShard& shard :
           ShardsOfBuffer(*model_, buffer.index, ranks_->size(), ranks_->rank(),
                          buffer.parameter_shard, buffer.gradient_shard)) {
        shards.push_back(std::move(shard));
      }
    }
    TANDEM_ASSIGN_OR_RETURN(optimizer_,
                            ShardedOptimizer::Create(std::move(shards), options, *model_, ranks_,
                                                     zero_.offload_optimizer));
    return absl::OkStatus();
  });
}

void ZeroStrategy::MakeGradients(Buffer& buffer) {
  const auto options = buffer.parameters.options();
  const int64_t numel = buffer.parameters.numel();
  buffer.gradients =
      shards_gradients() ? EmptyWithoutMemory(numel, options) : at::zeros({numel}, options);
  buffer.gradient_shard =
      shards_gradients() ? at::zeros({numel / ranks_->size()}, options) : ShardOf(buffer.gradients);
  ViewGradients(*model_, buffer.index, buffer.gradients);
}

// Parameters of stage 3.

void ZeroStrategy::RefreshCopy(Buffer& buffer) const {
  if (has_copies()) buffer.compute_shard.copy_(buffer.parameter_shard);
}

void ZeroStrategy::WidenMasters(Buffer& buffer) {
  AllocateMemory(buffer.parameters);
  for (const Parameter& parameter : model_->DeclaredParameters()) {
    if (parameter.buffer != buffer.index || !parameter.read_as_master) continue;
    const int64_t offset = parameter.value.storage_offset(), numel = parameter.value.numel();
    buffer.parameters.narrow(0, offset, numel).copy_(buffer.compute.narrow(0, offset, numel));
  }
}

void ZeroStrategy::RoundMatrices(Buffer& buffer) {
  if (std::exchange(buffer.rounded, true)) return;
  for (const Parameter& parameter : model_->DeclaredParameters()) {
    if (parameter.buffer != buffer.index || !parameter.rounded) continue;
    const at::Tensor values =
        buffer.parameters.narrow(0, parameter.value.storage_offset(), parameter.value.numel());
    ops::CopyRounded(values, values);
  }
}

void ZeroStrategy::StartGathering(int64_t block) {
  for (Buffer* const buffer : BuffersOf(block)) {
    if (buffer->gathered) continue;
    AllocateMemory(buffer->compute);
    buffer->gathering = AllGatherInBuckets(*ranks_, buffer->compute, buffer->compute_shard,
                                           zero_.allgather_bucket_size);
    buffer->gathered = true;
  }
}

void ZeroStrategy::Gather(int64_t block) {
  StartGathering(block);
  for (Buffer* const buffer : BuffersOf(block)) {
    buffer->gathering.Wait();
    if (has_copies() && !HasMemory(buffer->parameters)) WidenMasters(*buffer);
    if (shards_parameters()) RoundMatrices(*buffer);
  }
}

void ZeroStrategy::Release(int64_t block) {
  if (!shards_parameters()) return;
  for (Buffer* const buffer : BuffersOf(block)) {
    buffer->gathering.Wait();
    FreeMemory(buffer->compute);
    FreeMemory(buffer->parameters);
    buffer->gathered = false;
    buffer->rounded = false;
  }
}

// Gradients.

void ZeroStrategy::OpenGradients(int64_t block) {
  for (Buffer* const buffer : BuffersOf(block)) {
    if (!buffer->trains || !shards_gradients() || HasMemory(buffer->gradients)) continue;
    AllocateMemory(buffer->gradients);
    buffer->gradients.zero_();
  }
}

void ZeroStrategy::StartReducing(int64_t block) {
  for (Buffer* const buffer : BuffersOf(block)) {
    if (!buffer->trains) continue;
    // In stage 1 this rank's shard of the gradients becomes the sum.
    buffer->reduced =
        shards_gradients() ? at::empty_like(buffer->gradient_shard) : buffer->gradient_shard;
    buffer->reducing = ReduceScatterInBuckets(*ranks_, buffer->reduced, buffer->gradients,
                                              zero_.reduce_bucket_size);
  }
  if (!zero_.overlap_comm) FinishReducing(block);
}

void ZeroStrategy::FinishReducing(int64_t block) {
  if (block > last_block()) return;
  for (Buffer* const buffer : BuffersOf(block)) {
    if (!buffer->reduced.defined()) continue;
    buffer->reducing.Wait();
    if (shards_gradients()) {
      buffer->gradient_shard.add_(buffer->reduced);
      FreeMemory(buffer->gradients);
    }
    buffer->reduced.reset();
  }
}

at::Tensor ZeroStrategy::Gradient(absl::string_view parameter) const {
  const at::Tensor found = model_->Parameter(parameter);
  return found.defined() ? found.grad() : at::Tensor();
}

// Passes.

void ZeroStrategy::StartPass(bool has_one, InputFunction input, int64_t micro_batch,
                             std::optional<BlockPass>& pass, absl::Status& status) {
  if (!has_one || !status.ok()) return;
  status = CatchTorchErrors("input", [&] {
    pass.emplace(*model_, input(micro_batch), std::make_unique<CausalContext>(), recompute_);
    return absl::OkStatus();
  });
}

void ZeroStrategy::RunForward(std::optional<BlockPass>& pass, absl::Status& status, Then then) {
  at::Tensor hidden;
  for (int64_t block = 0; block <= last_block(); ++block) {
    Gather(block);
    if (zero_.overlap_comm) StartGathering(block < last_block() ? block + 1 : head_block_);
    if (pass.has_value() && status.ok()) {
      status = CatchTorchErrors("forward", [&] {
        hidden = pass->Forward(block, hidden);
        return absl::OkStatus();
      });
    }
    if (block < last_block()) Release(block);
  }
  Gather(head_block_);
  if (pass.has_value() && status.ok()) {
    status = CatchTorchErrors("output", [&] { return then(hidden); });
  }
  if (head_block_ < last_block()) Release(head_block_);
}

absl::StatusOr<std::vector<std::vector<double>>> ZeroStrategy::Forward(int64_t count,
                                                                       InputFunction input,
                                                                       OutputFunction output) {
  std::vector<std::vector<double>> outputs(static_cast<size_t>(count));
  const auto run = [&]() -> absl::Status {
    const at::NoGradGuard no_grad;
    absl::Status status;
    for (int64_t round = 0; round < Rounds(count, ranks_->size()); ++round) {
      const int64_t i = round * ranks_->size() + ranks_->rank();
      std::optional<BlockPass> pass;
      StartPass(i < count, input, i, pass, status);
      RunForward(pass, status, [&](const at::Tensor& hidden) -> absl::Status {
        TANDEM_ASSIGN_OR_RETURN(outputs[static_cast<size_t>(i)], output(i, pass->batch(), hidden));
        return absl::OkStatus();
      });
      Release(last_block());
    }
    return Exchange(status, outputs);
  };
  TANDEM_RETURN_IF_ERROR(CatchTorchErrors("forward", run));
  return outputs;
}

absl::StatusOr<std::vector<std::vector<double>>> ZeroStrategy::ParallelMap(
    int64_t count, absl::FunctionRef<absl::StatusOr<std::vector<double>>(int64_t)> compute) {
  return CatchTorchErrors("forward",
                          [&] { return ranks::ParallelMapOver(*ranks_, count, compute); });
}

absl::Status ZeroStrategy::Exchange(const absl::Status& status,
                                    std::vector<std::vector<double>>& outputs) {
  return ranks::ExchangeOutputs(
      *ranks_, status, [&](int64_t i) { return static_cast<int>(i % ranks_->size()); }, outputs);
}

absl::Status ZeroStrategy::ForwardBackward(int64_t count, InputFunction input, LossFunction loss) {
  return CatchTorchErrors("forward-backward", [&]() -> absl::Status {
    for (Buffer& buffer : buffers_) {
      if (buffer.trains) (shards_gradients() ? buffer.gradient_shard : buffer.gradients).zero_();
    }
    absl::Status status;
    const int64_t rounds = Rounds(count, ranks_->size());
    for (int64_t round = 0; round < rounds; ++round) {
      const int64_t i = round * ranks_->size() + ranks_->rank();
      std::optional<BlockPass> pass;
      StartPass(i < count, input, i, pass, status);
      at::Tensor gradient;
      OpenGradients(head_block_);
      RunForward(pass, status, [&](const at::Tensor& hidden) -> absl::Status {
        TANDEM_ASSIGN_OR_RETURN(gradient, loss(i, pass->batch(), hidden));
        return absl::OkStatus();
      });
      RunBackward(pass, std::move(gradient), status,
                  /*reduces=*/shards_gradients() || round + 1 == rounds);
    }
    return ranks::Agree(*ranks_, status);
  });
}

void ZeroStrategy::RunBackward(std::optional<BlockPass>& pass, at::Tensor gradient,
                               absl::Status& status, bool reduces) {
  for (int64_t block = last_block(); block >= 0; --block) {
    // The embedding's backward pass reads no weights.
    if (block > 0) Gather(block);
    if (block > 1 && zero_.overlap_comm) StartGathering(block - 1);
    OpenGradients(block);
    if (pass.has_value() && status.ok()) {
      status = CatchTorchErrors("backward", [&] {
        gradient = pass->Backward(gradient);
        return absl::OkStatus();
      });
    }
    Release(block);
    if (!reduces) continue;
    StartReducing(block);
    FinishReducing(block + 1);
  }
  FinishReducing(0);
}

absl::Status ZeroStrategy::Reduce(absl::Span<double> sums, absl::Span<double> maxima) {
  return CatchTorchErrors("reduction of metrics", [&] {
    ranks::ReduceNumbers(*ranks_, sums, ranks::Reduction::kSum);
    ranks::ReduceNumbers(*ranks_, maxima, ranks::Reduction::kMax);
    return absl::OkStatus();
  });
}

absl::Status ZeroStrategy::ReduceTensor(at::Tensor& sums) {
  return CatchTorchErrors("reduction of a tensor", [&] {
    ranks_->AllReduce(sums, ranks::Reduction::kSum);
    return absl::OkStatus();
  });
}

absl::StatusOr<OptimizerReport> ZeroStrategy::OptimizerStep(const OptimizerOverrides& overrides) {
  return CatchTorchErrors("optimizer step", [&] {
    return optimizer_->Step(*model_, overrides, [&] { GatherUpdate(); });
  });
}

void ZeroStrategy::GatherUpdate() {
  if (shards_parameters()) return DropGathered();
  for (const Buffer& buffer : buffers_) {
    if (!buffer.trains) continue;
    AllGatherInBuckets(*ranks_, buffer.parameters, buffer.parameter_shard,
                       zero_.allgather_bucket_size)
        .Wait();
  }
}

void ZeroStrategy::DropGathered() {
  for (int64_t block = 0; block <= last_block(); ++block) Release(block);
  for (Buffer& buffer : buffers_) RefreshCopy(buffer);
}

ShardRange ZeroStrategy::RangeOf(const Parameter& parameter, int rank) const {
  const Buffer& buffer = buffers_[static_cast<size_t>(parameter.buffer)];
  return RangeInShard(parameter, buffer.parameters.numel(), ranks_->size(), rank);
}

std::vector<Holding> ZeroStrategy::Holdings(const Parameter& parameter, int wanted_by) const {
  if (!IsSharded(parameter)) return {{.rank = wanted_by, .range = WholeRange(parameter)}};
  std::vector<Holding> holdings;
  for (int rank = 0; rank < ranks_->size(); ++rank) {
    const ShardRange range = RangeOf(parameter, rank);
    if (range.numel == 0) continue;
    Holding& holding = holdings.emplace_back(Holding{rank, WholeRange(parameter)});
    holding.range.offset = range.offset;
    holding.range.numel = range.numel;
  }
  return holdings;
}

at::Tensor ZeroStrategy::HeldValues(const Parameter& parameter) const {
  if (!IsSharded(parameter)) return Strategy::HeldValues(parameter);
  const ShardRange range = RangeOf(parameter, ranks_->rank());
  if (range.numel == 0) return {};
  return buffers_[static_cast<size_t>(parameter.buffer)].parameter_shard.narrow(
      0, range.shard_offset, range.numel);
}

at::Tensor ZeroStrategy::PartOf(const at::Tensor& whole, const Parameter& parameter) const {
  if (!IsSharded(parameter)) return Strategy::PartOf(whole, parameter);
  const ShardRange range = RangeOf(parameter, ranks_->rank());
  if (range.numel == 0) return {};
  return whole.contiguous().view(-1).narrow(0, range.offset, range.numel);
}

void ZeroStrategy::OnParametersReplaced() {
  if (shards_parameters()) DropGathered();
  model_->OnWeightsChanged();
  if (optimizer_ != nullptr) optimizer_->OnValuesReplaced();
}

}  // namespace tandem::parallel
