#include "common/parallel/megatron_strategy.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <limits>

#include "common/base/status_macros.h"
#include "common/model/model_config.h"
#include "common/parallel/communicator_group.h"
#include "common/parallel/pipeline_schedule.h"
#include "common/parallel/rank_agreement.h"
#include "common/tensor/catch_torch_errors.h"

namespace tandem::parallel {
namespace {

std::shared_ptr<ops::TensorParallelGroup> GroupOf(const std::shared_ptr<Communicator>& ranks) {
  return ranks->size() == 1 ? nullptr : std::make_shared<CommunicatorGroup>(ranks);
}

}  // namespace

PipelineShape MegatronStrategy::pipeline_shape() const {
  return {.stages = megatron_.pipeline_model_parallel_size,
          .chunks = megatron_.virtual_pipeline_model_parallel_size};
}

at::Tensor MegatronStrategy::PartOf(const at::Tensor& flat) const {
  if (!megatron_.use_distributed_optimizer) return flat;
  const int64_t numel = flat.numel() / mesh_->gradient->size();
  return flat.narrow(0, mesh_->gradient->rank() * numel, numel);
}

absl::Status MegatronStrategy::LoadModel(const std::string& directory, const LoadOptions& options) {
  return CatchTorchErrors("cannot load the model", [&]() -> absl::Status {
    absl::StatusOr<ModelConfig> config = LoadModelConfig(directory);
    absl::Status status = config.status();
    if (status.ok()) {
      status = CheckMegatronOptions(megatron_, *config, options.head, world_->size());
    }
    TANDEM_RETURN_IF_ERROR(AgreeByName(*world_, status));
    const MeshShape shape = {.tensor = static_cast<int>(megatron_.tensor_model_parallel_size),
                             .context = static_cast<int>(megatron_.context_parallel_size),
                             .data = static_cast<int>(data_parallel_size()),
                             .pipeline = static_cast<int>(megatron_.pipeline_model_parallel_size)};
    mesh_ = std::make_unique<ParallelMesh>(shape, *world_);
    output_group_ = GroupOf(mesh_->output);
    absl::StatusOr<std::unique_ptr<Model>> model =
        Model::Load(directory, PartialLoad(options, *config));
    TANDEM_RETURN_IF_ERROR(AgreeByName(*world_, model.status()));
    model_ = *std::move(model);
    for (int64_t index = 0; index < model_->num_blocks(); ++index) {
      const at::Tensor& buffer = model_->BlockBuffers()[static_cast<size_t>(index)];
      if (buffer.numel() == 0) continue;
      // With a version counter of its own: to autograd, an update changes nothing.
      const at::Tensor parameters = buffer.variable_data();
      Block& block = blocks_.emplace_back();
      block.index = index;
      block.parameters = parameters;
      block.parameter_part = PartOf(parameters);
    }
    return absl::OkStatus();
  });
}

LoadOptions MegatronStrategy::PartialLoad(const LoadOptions& options,
                                          const ModelConfig& config) const {
  LoadOptions load = options;
  load.placement.shard_index = mesh_->at.tensor;
  load.placement.shard_count = mesh_->shape.tensor;
  load.placement.shard_group = GroupOf(mesh_->tensor);
  load.placement.output_group = output_group_;
  if (megatron_.use_distributed_optimizer) load.placement.buffer_parts = mesh_->gradient->size();
  std::vector<BlockRange> chunks;
  for (int64_t chunk = 0; chunk < pipeline_shape().chunks; ++chunk) {
    chunks.push_back(
        BlocksOfChunk(config.num_hidden_layers, pipeline_shape(), mesh_->at.pipeline, chunk));
  }
  const bool holds_tied_head = is_last_stage() && options.head == HeadKind::kLm &&
                               config.tie_word_embeddings && !options.untie_embeddings;
  load.placement.holds_block = [chunks, holds_tied_head](int64_t block) {
    return (block == 0 && holds_tied_head) ||
           std::any_of(chunks.begin(), chunks.end(),
                       [&](const BlockRange& chunk) { return chunk.Has(block); });
  };
  return load;
}

absl::Status MegatronStrategy::BuildOptimizer(const OptimizerOptions& options) {
  return CatchTorchErrors("cannot build the optimizer", [&]() -> absl::Status {
    const std::vector<Parameter>& parameters = model_->DeclaredParameters();
    if (std::none_of(parameters.begin(), parameters.end(),
                     [](const Parameter& parameter) { return parameter.trainable; })) {
      return absl::InvalidArgumentError("no parameter of the model requires a gradient");
    }
    const bool shares_out = megatron_.use_distributed_optimizer;
    const int parts = shares_out ? mesh_->gradient->size() : 1;
    const int part = shares_out ? mesh_->gradient->rank() : 0;
    std::vector<OptimizerPiece> pieces;
    for (Block& block : blocks_) {
      block.trains = BlockTrains(*model_, block.index);
      if (!block.trains) continue;
      block.gradients = at::zeros_like(block.parameters);
      block.gradient_part = PartOf(block.gradients);
      ViewGradients(*model_, block.index, block.gradients);
      for (OptimizerPiece& piece : PiecesOfBlock(*model_, block.index, parts, part,
                                                 block.parameter_part, block.gradient_part)) {
        const bool is_cut = piece.slice.shard.count > 1;
        piece.counts = (is_cut || mesh_->at.tensor == 0) && !holds_copy(block.index) &&
                       (shares_out || mesh_->gradient->rank() == 0);
        pieces.push_back(std::move(piece));
      }
    }
    optimizer_ = std::make_unique<PieceOptimizer>(std::move(pieces), options, *model_, world_);
    return absl::OkStatus();
  });
}

// The output layer.

at::Tensor MegatronStrategy::OutputRowsOf(const at::Tensor& head) const {
  const int64_t rows = head.size(0) / mesh_->shape.context;
  return head.narrow(0, mesh_->at.context * rows, rows);
}

OutputShard MegatronStrategy::output_shard() {
  return {
      .weight = computes_output() ? OutputRowsOf(model_->lm_head().compute_weight()) : at::Tensor(),
      .group = output_group_};
}

at::Tensor MegatronStrategy::Gradient(absl::string_view parameter) const {
  const at::Tensor gradient =
      model_->Parameter(parameter).defined() ? model_->Parameter(parameter).grad() : at::Tensor();
  const bool is_head = model_->head() == HeadKind::kLm && parameter == model_->lm_head_name();
  return gradient.defined() && is_head ? OutputRowsOf(gradient) : gradient;
}

// Passes.

Stage MegatronStrategy::MakeStage() const {
  return {.model = *model_,
          .mesh = *mesh_,
          .shape = pipeline_shape(),
          .recompute = megatron_.recompute_granularity};
}

absl::StatusOr<std::vector<RaggedBatch>> MegatronStrategy::Inputs(int64_t count,
                                                                  InputFunction input) const {
  std::vector<RaggedBatch> batches;
  const absl::Status status = CatchTorchErrors("input", [&] {
    for (int64_t i = GlobalIndex(0); i < count; i += data_parallel_size()) {
      batches.push_back(input(i));
    }
    return absl::OkStatus();
  });
  TANDEM_RETURN_IF_ERROR(Agree(*world_, status));
  return batches;
}

absl::StatusOr<std::vector<std::vector<double>>> MegatronStrategy::Forward(int64_t count,
                                                                           InputFunction input,
                                                                           OutputFunction output) {
  std::vector<std::vector<double>> outputs(static_cast<size_t>(count));
  const auto run = [&]() -> absl::Status {
    const at::NoGradGuard no_grad;
    TANDEM_ASSIGN_OR_RETURN(std::vector<RaggedBatch> batches, Inputs(count, input));
    const absl::Status status =
        StagePass(MakeStage(), std::move(batches))
            .Run([&](int64_t micro_batch, const RaggedBatch& batch,
                     const at::Tensor& hidden) -> absl::StatusOr<at::Tensor> {
              const int64_t i = GlobalIndex(micro_batch);
              TANDEM_ASSIGN_OR_RETURN(outputs[static_cast<size_t>(i)], output(i, batch, hidden));
              return at::Tensor();
            });
    const auto speaker = [&](int64_t i) {
      return mesh_->shape.Rank({.data = static_cast<int>(i % data_parallel_size()),
                                .pipeline = mesh_->shape.pipeline - 1});
    };
    return ExchangeOutputs(*world_, status, speaker, outputs);
  };
  TANDEM_RETURN_IF_ERROR(CatchTorchErrors("forward", run));
  return outputs;
}

absl::StatusOr<std::vector<std::vector<double>>> MegatronStrategy::ShareOut(
    int64_t count, absl::FunctionRef<absl::StatusOr<std::vector<double>>(int64_t)> compute) {
  return CatchTorchErrors("forward", [&] { return ShareOutOver(*world_, count, compute); });
}

absl::Status MegatronStrategy::ForwardBackward(int64_t count, InputFunction input,
                                               LossFunction loss) {
  return CatchTorchErrors("forward-backward", [&]() -> absl::Status {
    for (Block& block : blocks_) {
      if (block.trains) block.gradients.zero_();
    }
    TANDEM_ASSIGN_OR_RETURN(std::vector<RaggedBatch> batches, Inputs(count, input));
    const absl::Status status =
        StagePass(MakeStage(), std::move(batches))
            .Run([&](int64_t micro_batch, const RaggedBatch& batch, const at::Tensor& hidden) {
              return loss(GlobalIndex(micro_batch), batch, hidden);
            });
    TANDEM_RETURN_IF_ERROR(Agree(*world_, status));
    ReduceGradients();
    return absl::OkStatus();
  });
}

// Gradients and updates.

void MegatronStrategy::SumOverTensorRanks() {
  if (mesh_->tensor->size() == 1) return;
  std::vector<at::Tensor> gradients, flat;
  for (const Parameter& parameter : model_->DeclaredParameters()) {
    if (!parameter.trainable || !parameter.value.defined()) continue;
    if (parameter.spec.shard_axis.has_value()) continue;
    gradients.push_back(parameter.value.grad());
    flat.push_back(gradients.back().view(-1));
  }
  if (flat.empty()) return;
  at::Tensor all = at::cat(flat);
  mesh_->tensor->AllReduce(all, Reduction::kSum);
  int64_t offset = 0;
  for (const at::Tensor& gradient : flat) {
    gradient.copy_(all.narrow(0, offset, gradient.numel()));
    offset += gradient.numel();
  }
}

void MegatronStrategy::ReduceGradients() {
  SumOverTensorRanks();
  for (Block& block : blocks_) {
    if (!block.trains) continue;
    if (megatron_.use_distributed_optimizer) {
      mesh_->gradient->ReduceScatter(block.gradient_part, block.gradients);
    } else {
      mesh_->gradient->AllReduce(block.gradients, Reduction::kSum);
    }
    if (block.index == 0 && model_->tied() && mesh_->embedding != nullptr) {
      mesh_->embedding->AllReduce(block.gradient_part, Reduction::kSum);
    }
  }
}

absl::Status MegatronStrategy::Reduce(absl::Span<double> sums, absl::Span<double> maxima) {
  return CatchTorchErrors("reduction of metrics", [&] {
    if (!speaks_for_replica()) {
      std::fill(sums.begin(), sums.end(), 0.0);
      std::fill(maxima.begin(), maxima.end(), -std::numeric_limits<double>::infinity());
    }
    ReduceNumbers(*world_, sums, Reduction::kSum);
    ReduceNumbers(*world_, maxima, Reduction::kMax);
    return absl::OkStatus();
  });
}

absl::StatusOr<OptimizerReport> MegatronStrategy::OptimizerStep() {
  return CatchTorchErrors("optimizer step",
                          [&] { return optimizer_->Step(*model_, [&] { SpreadUpdate(); }); });
}

void MegatronStrategy::SpreadUpdate() {
  if (!megatron_.use_distributed_optimizer) return;
  for (const Block& block : blocks_) {
    if (block.trains) mesh_->gradient->AllGather(block.parameters, block.parameter_part);
  }
}

absl::Status MegatronStrategy::ResetOptimizer() {
  return CatchTorchErrors("cannot reset the optimizer", [&] {
    optimizer_->Reset();
    return absl::OkStatus();
  });
}

// Parameters and state.

at::Tensor MegatronStrategy::Collected(const Parameter& parameter) const {
  // Of the stage that runs the block: the first replica and context rank.
  MeshCoordinates owner;
  const int64_t layers = model_->config().num_hidden_layers;
  const PipelineShape shape = pipeline_shape();
  for (int64_t part = 0; part < shape.stages * shape.chunks; ++part) {
    const auto stage = static_cast<int>(part % shape.stages);
    if (BlocksOfChunk(layers, shape, stage, part / shape.stages).Has(parameter.spec.block)) {
      owner.pipeline = stage;
    }
  }
  std::vector<at::Tensor> shards;
  for (; owner.tensor < static_cast<int>(parameter.shard.count); ++owner.tensor) {
    const int rank = mesh_->shape.Rank(owner);
    const at::Tensor own = parameter.value.defined() ? parameter.value.detach() : at::Tensor();
    if (rank == world_->rank() && rank != 0) world_->Send(own, 0);
    if (world_->rank() != 0) continue;
    if (rank == 0) {
      shards.push_back(own);
      continue;
    }
    std::vector<int64_t> size = parameter.spec.shape;
    size[static_cast<size_t>(parameter.shard.axis)] /= parameter.shard.count;
    shards.push_back(at::empty(size, model_->BlockBuffers()[0].options()));
    world_->Recv(shards.back(), rank);
  }
  if (shards.empty()) return {};
  return shards.size() == 1 ? shards[0] : at::cat(shards, parameter.shard.axis);
}

absl::Status MegatronStrategy::VisitParameters(TensorVisitor visit) {
  return CatchTorchErrors("visit of parameters", [&] {
    const at::NoGradGuard no_grad;
    absl::Status status;
    for (const Parameter& parameter : model_->DeclaredParameters()) {
      const at::Tensor whole = Collected(parameter);
      if (world_->rank() != 0 || !status.ok()) continue;
      status = CatchTorchErrors("visit", [&] { return visit(parameter.spec.name, whole); });
    }
    return Agree(*world_, status);
  });
}

absl::Status MegatronStrategy::ScatterParameters(const NamedTensors& parameters) {
  // Every rank checks the same whole tensors, and so finds the same.
  return CatchTorchErrors("cannot replace parameters",
                          [&] { return model_->LoadParameters(parameters); });
}

absl::Status MegatronStrategy::SaveOptimizer(const std::string& directory) {
  return CatchTorchErrors("cannot save the optimizer", [&] { return optimizer_->Save(directory); });
}

absl::Status MegatronStrategy::LoadOptimizer(const std::string& directory) {
  return CatchTorchErrors("cannot load the optimizer", [&] { return optimizer_->Load(directory); });
}

}  // namespace tandem::parallel
