#include "common/parallel/megatron/megatron_strategy.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <limits>
#include <optional>

#include "common/base/errors/status_macros.h"
#include "common/model/config/model_config.h"
#include "common/parallel/held_values.h"
#include "common/parallel/megatron/pipeline_schedule.h"
#include "common/ranks/communicator_group.h"
#include "common/ranks/rank_agreement.h"
#include "common/tensor/aten/catch_torch_errors.h"

namespace tandem::parallel {
namespace {

std::shared_ptr<ops::TensorParallelGroup> GroupOf(
    const std::shared_ptr<ranks::Communicator>& ranks) {
  return ranks->size() == 1 ? nullptr : std::make_shared<ranks::CommunicatorGroup>(ranks);
}

}  // namespace

at::Tensor MegatronStrategy::ShardOf(const at::Tensor& flat,
                                     const ranks::Communicator& holders) const {
  if (!megatron_.use_distributed_optimizer) return flat;
  const int64_t numel = flat.numel() / holders.size();
  return flat.narrow(0, holders.rank() * numel, numel);
}

absl::Status MegatronStrategy::LoadModel(const std::string& directory, const LoadOptions& options) {
  return CatchTorchErrors("cannot load the model", [&]() -> absl::Status {
    // Ranks wait for the files of others without a time limit.
    absl::StatusOr<ModelConfig> config = LoadModelConfig(directory);
    absl::Status status = config.status();
    if (status.ok()) {
      status = CheckMegatronOptions(megatron_, *config, options.head, world_->size(),
                                    options.num_token_ids);
    }
    TANDEM_RETURN_IF_ERROR(ranks::AgreeByName(*world_->patient(), status));
    mesh_ = std::make_unique<ParallelMesh>(MeshOf(megatron_, world_->size()), *world_);
    output_group_ = GroupOf(mesh_->output);
    absl::StatusOr<std::unique_ptr<Model>> model =
        Model::Load(directory, PartialLoad(options, *config));
    TANDEM_RETURN_IF_ERROR(ranks::AgreeByName(*world_->patient(), model.status()));
    model_ = *std::move(model);
    const std::vector<at::Tensor>& all = model_->BlockBuffers();
    for (size_t i = 0; i < all.size(); ++i) {
      if (all[i].numel() == 0) continue;
      Buffer& buffer = buffers_.emplace_back();
      buffer.index = static_cast<int64_t>(i);
      buffer.holders = model_->HasExperts(buffer.index) ? mesh_->expert_gradient : mesh_->gradient;
      // An alias with its own version counter: autograd does not see updates.
      buffer.parameters = all[i].variable_data();
      buffer.parameter_shard = ShardOf(buffer.parameters, *buffer.holders);
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
  load.placement.experts = {.index = mesh_->shape.ExpertRank(mesh_->at),
                            .count = mesh_->shape.expert};
  if (mesh_->shape.expert > 1) {
    load.placement.expert_group = std::make_shared<ranks::ExpertCommunicatorGroup>(mesh_->expert);
  }
  if (megatron_.use_distributed_optimizer) load.placement.buffer_shards = mesh_->gradient->size();
  std::vector<BlockRange> held;
  for (int64_t i = 0; i < PipelineOf(megatron_).virtual_stages; ++i) {
    held.push_back(BlocksOfVirtualStage(config.num_hidden_layers, config.FirstLayerBlock(),
                                        PipelineOf(megatron_), mesh_->at.pipeline, i));
  }
  const bool holds_tied_head = is_last_stage() && options.head == HeadKind::kLm &&
                               config.tie_word_embeddings && !options.untie_embeddings;
  load.placement.holds_block = [held, holds_tied_head](int64_t block) {
    return (block == 0 && holds_tied_head) ||
           std::any_of(held.begin(), held.end(),
                       [&](const BlockRange& blocks) { return blocks.Has(block); });
  };
  return load;
}

absl::Status MegatronStrategy::BuildOptimizer(const OptimizerOptions& options) {
  return CatchTorchErrors("cannot build the optimizer", [&]() -> absl::Status {
    const bool is_distributed = megatron_.use_distributed_optimizer;
    std::vector<OptimizerShard> shards;
    for (Buffer& buffer : buffers_) {
      buffer.trains = BufferTrains(*model_, buffer.index);
      if (!buffer.trains) continue;
      buffer.gradients = at::zeros_like(buffer.parameters);
      buffer.gradient_shard = ShardOf(buffer.gradients, *buffer.holders);
      ViewGradients(*model_, buffer.index, buffer.gradients);
      const int count = is_distributed ? buffer.holders->size() : 1;
      const int own = is_distributed ? buffer.holders->rank() : 0;
      for (OptimizerShard& shard : ShardsOfBuffer(*model_, buffer.index, count, own,
                                                  buffer.parameter_shard, buffer.gradient_shard)) {
        const bool is_tensor_parallel = shard.range.shard.count > 1;
        shard.counts = (is_tensor_parallel || mesh_->at.tensor == 0) && !holds_copy(buffer.index) &&
                       (is_distributed || buffer.holders->rank() == 0);
        shards.push_back(std::move(shard));
      }
    }
    TANDEM_ASSIGN_OR_RETURN(optimizer_,
                            ShardedOptimizer::Create(std::move(shards), options, *model_, world_));
    return absl::OkStatus();
  });
}

// The output layer.

TokenRange MegatronStrategy::OutputTokensHere() const {
  return OutputTokens(megatron_, model_->config().vocab_size, model_->num_token_ids(),
                      {.tensor = mesh_->at.tensor, .context = mesh_->at.context});
}

ops::MatrixRows MegatronStrategy::OutputRowsOf(const ops::MatrixRows& head) const {
  const Shard context = {.index = mesh_->at.context, .count = mesh_->shape.context};
  return head.Narrow(context.Begin(head.size(0)), OutputTokensHere().size);
}

OutputShard MegatronStrategy::output_shard() {
  if (!computes_output()) return {};
  const TokenRange first = OutputTokens(megatron_, model_->config().vocab_size,
                                        model_->num_token_ids(), {.tensor = 0, .context = 0});
  return {.weight = OutputRowsOf(model_->head_rows()),
          .vocabulary = {.group = output_group_,
                         .first = OutputTokensHere().first,
                         .size = model_->num_token_ids(),
                         .most_rows = first.size},
          .soft_cap = model_->logit_soft_cap()};
}

at::Tensor MegatronStrategy::OutputGradient() {
  const at::Tensor gradient = Gradient(model_->lm_head_name());
  return gradient.defined() ? OutputRowsOf(gradient).dense() : gradient;
}

at::Tensor MegatronStrategy::Gradient(absl::string_view parameter) const {
  const at::Tensor found = model_->Parameter(parameter);
  return found.defined() ? found.grad() : at::Tensor();
}

// Passes.

Stage MegatronStrategy::MakeStage() const {
  return {
      .model = *model_, .mesh = *mesh_, .shape = PipelineOf(megatron_), .recompute = recompute_};
}

absl::StatusOr<std::vector<RaggedBatch>> MegatronStrategy::Inputs(int64_t count,
                                                                  InputFunction input) const {
  std::vector<RaggedBatch> batches;
  const absl::Status status = CatchTorchErrors("input", [&] {
    for (int64_t i = GlobalIndex(0); i < count; i += data_parallel_size()) {
      batches.push_back(input(i));
      // The tower reads them, on the first stage.
      const bool reads_images =
          mesh_->at.pipeline == 0 || (is_last_stage() && outputs_read_images_);
      if (!reads_images) batches.back().images.pixel_values.reset();
    }
    const int64_t most = (count + data_parallel_size() - 1) / data_parallel_size();
    while (mesh_->shape.expert > 1 && static_cast<int64_t>(batches.size()) < most) {
      batches.push_back(MakeRaggedBatch({}, model_->device()));
    }
    return absl::OkStatus();
  });
  TANDEM_RETURN_IF_ERROR(ranks::Agree(*world_, status));
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
    return ranks::ExchangeOutputs(*world_, status, speaker, outputs);
  };
  TANDEM_RETURN_IF_ERROR(CatchTorchErrors("forward", run));
  return outputs;
}

absl::StatusOr<std::vector<std::vector<double>>> MegatronStrategy::ParallelMap(
    int64_t count, absl::FunctionRef<absl::StatusOr<std::vector<double>>(int64_t)> compute) {
  return CatchTorchErrors("forward",
                          [&] { return ranks::ParallelMapOver(*world_, count, compute); });
}

absl::Status MegatronStrategy::ForwardBackward(int64_t count, InputFunction input,
                                               LossFunction loss) {
  return CatchTorchErrors("forward-backward", [&]() -> absl::Status {
    for (Buffer& buffer : buffers_) {
      if (buffer.trains) buffer.gradients.zero_();
    }
    TANDEM_ASSIGN_OR_RETURN(std::vector<RaggedBatch> batches, Inputs(count, input));
    const absl::Status status =
        StagePass(MakeStage(), std::move(batches))
            .Run([&](int64_t micro_batch, const RaggedBatch& batch, const at::Tensor& hidden) {
              return loss(GlobalIndex(micro_batch), batch, hidden);
            });
    TANDEM_RETURN_IF_ERROR(ranks::Agree(*world_, status));
    ReduceGradients();
    return absl::OkStatus();
  });
}

// Gradients and updates.

void MegatronStrategy::SumOverTensorRanks() {
  if (mesh_->tensor->size() == 1) return;
  std::vector<at::Tensor> flat;
  for (const Parameter& parameter : model_->DeclaredParameters()) {
    if (!parameter.trainable || !parameter.value.defined()) continue;
    if (parameter.spec.shard_axis.has_value()) continue;
    flat.push_back(parameter.value.grad().view(-1));
  }
  if (flat.empty()) return;
  at::Tensor all = at::cat(flat);
  mesh_->tensor->AllReduce(all, ranks::Reduction::kSum);
  int64_t offset = 0;
  for (const at::Tensor& gradient : flat) {
    gradient.copy_(all.narrow(0, offset, gradient.numel()));
    offset += gradient.numel();
  }
}

void MegatronStrategy::ReduceGradients() {
  SumOverTensorRanks();
  for (Buffer& buffer : buffers_) {
    if (!buffer.trains) continue;
    if (megatron_.use_distributed_optimizer) {
      buffer.holders->ReduceScatter(buffer.gradient_shard, buffer.gradients);
    } else {
      buffer.holders->AllReduce(buffer.gradients, ranks::Reduction::kSum);
    }
    if (buffer.index == 0 && model_->tied() && mesh_->embedding != nullptr) {
      mesh_->embedding->AllReduce(buffer.gradient_shard, ranks::Reduction::kSum);
    }
  }
}

absl::Status MegatronStrategy::Reduce(absl::Span<double> sums, absl::Span<double> maxima) {
  return CatchTorchErrors("reduction of metrics", [&] {
    if (!speaks_for_replica()) {
      std::fill(sums.begin(), sums.end(), 0.0);
      std::fill(maxima.begin(), maxima.end(), -std::numeric_limits<double>::infinity());
    }
    ranks::ReduceNumbers(*world_, sums, ranks::Reduction::kSum);
    ranks::ReduceNumbers(*world_, maxima, ranks::Reduction::kMax);
    return absl::OkStatus();
  });
}

absl::Status MegatronStrategy::ReduceTensor(at::Tensor& sums) {
  return CatchTorchErrors("reduction of a tensor", [&] {
    if (!speaks_for_replica()) sums.zero_();
    world_->AllReduce(sums, ranks::Reduction::kSum);
    return absl::OkStatus();
  });
}

absl::StatusOr<OptimizerReport> MegatronStrategy::OptimizerStep(
    const OptimizerOverrides& overrides) {
  return CatchTorchErrors("optimizer step", [&] {
    return optimizer_->Step(*model_, overrides, [&] { GatherUpdate(); });
  });
}

void MegatronStrategy::GatherUpdate() {
  if (!megatron_.use_distributed_optimizer) return;
  for (const Buffer& buffer : buffers_) {
    if (buffer.trains) buffer.holders->AllGather(buffer.parameters, buffer.parameter_shard);
  }
}

// Parameters and state.

int MegatronStrategy::StageOf(int64_t block) const {
  const int64_t layers = model_->config().num_hidden_layers,
                first_layer = model_->config().FirstLayerBlock();
  const PipelineShape shape = PipelineOf(megatron_);
  for (int64_t i = 0; i < shape.stages * shape.virtual_stages; ++i) {
    const auto stage = static_cast<int>(i % shape.stages);
    if (BlocksOfVirtualStage(layers, first_layer, shape, stage, i / shape.stages).Has(block)) {
      return stage;
    }
  }
  return 0;
}

std::vector<Holding> MegatronStrategy::Holdings(const Parameter& parameter, int wanted_by) const {
  // The replica and context rank of the rank that wants it, or the first ones with the expert.
  MeshCoordinates owner = mesh_->shape.Coordinates(wanted_by);
  if (const std::optional<ExpertOfLayer>& expert = parameter.spec.expert; expert.has_value()) {
    const ExpertShard shards = {.count = mesh_->shape.expert};
    const auto place = static_cast<int>(expert->index / shards.Size(expert->count));
    if (mesh_->shape.ExpertRank(owner) != place) owner = mesh_->shape.FirstOfExperts(place);
  }
  owner.pipeline = StageOf(parameter.spec.block);
  std::vector<Holding> holdings;
  for (int tensor = 0; tensor < static_cast<int>(parameter.shard.count); ++tensor) {
    // A parameter without shards is on every tensor rank.
    if (parameter.shard.count > 1) owner.tensor = tensor;
    Holding& holding =
        holdings.emplace_back(Holding{mesh_->shape.Rank(owner), WholeRange(parameter)});
    holding.range.shard = {
        .axis = parameter.shard.axis, .index = tensor, .count = parameter.shard.count};
    holding.range.numel = 1;
    for (const int64_t extent : holding.range.shard.ShapeOf(parameter.spec.shape)) {
      holding.range.numel *= extent;
    }
  }
  return holdings;
}

}  // namespace tandem::parallel
