#include "common/parallel/testing/strategy_runs.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <utility>

#include "common/loss/logits/linear_cross_entropy.h"
#include "common/model/passes/router_losses.h"
#include "common/model/testing/image_batches.h"
#include "common/ranks/testing/rank_processes.h"

namespace tandem::parallel {
namespace {

void Check(const absl::Status& status) {
  if (status.ok()) return;
  std::cerr << status << std::endl;
  std::abort();
}

using Sequences = std::vector<std::vector<int64_t>>;

Sequences MicroBatch(const Model& model, int64_t index, uint64_t seed) {
  const at::Generator generator =
      at::detail::createCPUGenerator(seed * 1000 + static_cast<uint64_t>(index));
  Sequences sequences;
  for (const int64_t length : {3 + index, int64_t{9}, 2 + 4 * (index % 3)}) {
    const at::Tensor tokens = at::randint(0, model.num_token_ids(), {length}, generator,
                                          at::TensorOptions().dtype(at::kLong));
    sequences.emplace_back(tokens.const_data_ptr<int64_t>(),
                           tokens.const_data_ptr<int64_t>() + length);
  }
  return sequences;
}

// Returns the rows that predict every token but the first of a sequence.
loss::OutputRows RowsOf(const Sequences& sequences) {
  loss::OutputRows rows;
  int64_t offset = 0;
  for (const std::vector<int64_t>& tokens : sequences) {
    for (size_t t = 0; t + 1 < tokens.size(); ++t) {
      rows.positions.push_back(offset + static_cast<int64_t>(t));
      rows.labels.push_back(tokens[t + 1]);
    }
    offset += static_cast<int64_t>(tokens.size());
  }
  return rows;
}

int64_t CountRows(const Model& model, int64_t micro_batches, uint64_t seed) {
  size_t count = 0;
  for (int64_t i = 0; i < micro_batches; ++i) {
    count += RowsOf(MicroBatch(model, i, seed)).labels.size();
  }
  return static_cast<int64_t>(count);
}

// Returns scales that give the routers' losses the coefficients 0.5 and 0.02; 0 for a model without
// experts.
RouterLosses::Scales RouterScales(const Model& model, int64_t micro_batches, uint64_t seed) {
  const int64_t layers =
      model.config().decoder.experts.LayersBefore(model.config().num_hidden_layers);
  if (layers == 0) return {};
  int64_t choices = 0;
  for (int64_t i = 0; i < micro_batches; ++i) {
    for (const auto& tokens : MicroBatch(model, i, seed)) {
      choices += layers * static_cast<int64_t>(tokens.size());
    }
  }
  return {.load_balancing = 0.5 / static_cast<double>(choices),
          .z = 0.02 / static_cast<double>(choices)};
}

// Returns both losses of what the routers recorded on all ranks.
double SumOfRouters(Strategy& strategy, const std::vector<std::shared_ptr<RouterLosses>>& routers,
                    const RouterLosses::Scales& scales) {
  at::Tensor losses = at::zeros({2}, at::kDouble);
  for (const auto& recorded : routers) {
    losses += recorded->sums().sum(0).slice(0, -2).to(at::kCPU);
  }
  losses = losses.to(strategy.ranks().device());
  strategy.ranks().AllReduce(losses, ranks::Reduction::kSum);
  return scales.load_balancing * losses[0].item<double>() + scales.z * losses[1].item<double>();
}

at::Tensor Positions(const loss::OutputRows& rows, at::Device device) {
  return at::tensor(rows.positions, at::kLong).to(device);
}

std::unique_ptr<loss::LinearCrossEntropyLoss> CrossEntropy(Strategy& strategy) {
  const OutputShard output = strategy.output_shard();
  return loss::LinearCrossEntropyLoss::Create(
             output.weight, {.vocabulary = output.vocabulary, .soft_cap = output.soft_cap})
      .value();
}

// Adds the loss to `sum`, as a summand of the mean over `rows_of_batch`.
absl::StatusOr<at::Tensor> LmLoss(Strategy& strategy, const loss::OutputRows& rows,
                                  const at::Tensor& hidden, double rows_of_batch, double& sum) {
  loss::OutputGradients gradients = {.hidden = at::zeros_like(hidden.detach()),
                                     .weight = strategy.OutputGradient()};
  const absl::Status status = CrossEntropy(strategy)->ForwardBackward(
      hidden.detach(), rows,
      [&](int64_t, absl::Span<const double> logprobs, absl::Span<const double>,
          absl::Span<double> c, absl::Span<double>) {
        for (size_t i = 0; i < logprobs.size(); ++i) {
          sum -= logprobs[i] / rows_of_batch;
          c[i] = -1 / rows_of_batch;
        }
        return absl::OkStatus();
      },
      gradients);
  if (!status.ok()) return status;
  return gradients.hidden;
}

absl::StatusOr<at::Tensor> ValueLoss(const Model& model, const loss::OutputRows& rows,
                                     const at::Tensor& hidden, double rows_of_batch, double& sum) {
  const at::Tensor values = model.Values(hidden.index_select(0, Positions(rows, hidden.device())));
  const at::Tensor target = at::tensor(rows.labels, at::kFloat).to(hidden.device()) / 10;
  const at::Tensor loss = (values - target).square().sum() / rows_of_batch;
  sum += loss.item<double>();
  loss.backward();
  return hidden.grad();
}

}  // namespace

void Prepare(Strategy& strategy, const std::string& directory, const LoadOptions& load,
             const OptimizerOptions& optimizer) {
  LoadOptions training = load;
  training.requires_grad = true;
  training.placement.device = ranks::DeviceOfTests();
  Check(strategy.LoadModel(directory, training));
  if (!load.freeze_all) Check(strategy.BuildOptimizer(optimizer));
}

StepNumbers Step(Strategy& strategy, int64_t micro_batches, uint64_t seed) {
  const Model& model = strategy.model();
  const auto rows_of_batch = static_cast<double>(CountRows(model, micro_batches, seed));
  StepNumbers numbers;
  std::vector<std::shared_ptr<RouterLosses>> routers;
  const RouterLosses::Scales scales = RouterScales(model, micro_batches, seed);
  Check(strategy.ForwardBackward(
      micro_batches,
      [&](int64_t i) {
        RaggedBatch batch = MakeBatchWithImages(model, MicroBatch(model, i, seed));
        if (scales.z == 0) return batch;
        routers.push_back(std::make_shared<RouterLosses>(model.config().decoder.experts,
                                                         model.config().num_hidden_layers, scales,
                                                         model.device()));
        batch.routing.losses = routers.back();
        return batch;
      },
      [&](int64_t i, const RaggedBatch& batch, const at::Tensor& hidden) {
        numbers.longest = std::max(numbers.longest, static_cast<double>(batch.num_tokens()));
        const loss::OutputRows rows = RowsOf(MicroBatch(model, i, seed));
        return model.head() == HeadKind::kLm
                   ? LmLoss(strategy, rows, hidden, rows_of_batch, numbers.loss)
                   : ValueLoss(model, rows, hidden, rows_of_batch, numbers.loss);
      }));
  Check(strategy.Reduce(absl::MakeSpan(&numbers.loss, 1), absl::MakeSpan(&numbers.longest, 1)));
  const absl::StatusOr<OptimizerReport> report = strategy.OptimizerStep({});
  Check(report.status());
  numbers.grad_norm = report->grad_norm;
  if (scales.z > 0) numbers.router_loss = SumOfRouters(strategy, routers, scales);
  return numbers;
}

std::vector<StepNumbers> Steps(Strategy& strategy, int count, int64_t micro_batches) {
  std::vector<StepNumbers> steps;
  for (int i = 0; i < count; ++i) {
    steps.push_back(Step(strategy, micro_batches, static_cast<uint64_t>(i)));
  }
  return steps;
}

NamedTensors WholeParameters(Strategy& strategy) {
  NamedTensors parameters;
  Check(strategy.VisitParameters([&](const std::string& name, const at::Tensor& parameter) {
    parameters.emplace_back(name, parameter.clone());
    return absl::OkStatus();
  }));
  return parameters;
}

std::vector<std::vector<double>> Outputs(Strategy& strategy, int64_t micro_batches, uint64_t seed) {
  const Model& model = strategy.model();
  auto outputs = strategy.Forward(
      micro_batches,
      [&](int64_t i) { return MakeBatchWithImages(model, MicroBatch(model, i, seed)); },
      [&](int64_t i, const RaggedBatch&,
          const at::Tensor& hidden) -> absl::StatusOr<std::vector<double>> {
        const loss::OutputRows rows = RowsOf(MicroBatch(model, i, seed));
        if (model.head() == HeadKind::kLm) {
          auto values = CrossEntropy(strategy)->LogProbs(hidden, rows);
          if (!values.ok()) return values.status();
          return std::move(values->logprobs);
        }
        const at::Tensor values =
            model.Values(hidden.index_select(0, Positions(rows, hidden.device())))
                .to(at::kDouble)
                .cpu()
                .contiguous();
        return std::vector<double>(values.const_data_ptr<double>(),
                                   values.const_data_ptr<double>() + values.numel());
      });
  Check(outputs.status());
  return *std::move(outputs);
}

}  // namespace tandem::parallel
