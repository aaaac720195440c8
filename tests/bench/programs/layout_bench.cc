// One rank of a training layout, as a process that bench_layouts.py times beside its peers,
// configured by torchrun's environment variables. It executes every line of its input as a command,
// and answers with one line of JSON:
//
//     tandem-layout-bench --model DIR strategy.name=zero strategy.stage=3
//     step    forward, backward and update of all micro-batches: {"seconds", "cpu_seconds",
//             "sent_bytes": those of the process group of all ranks, not of smaller groups}
//     memory  {"bytes": anonymous resident memory beyond that of the process without a model,
//             "peak_bytes": its largest value since the last memory command}
//     export  writes the model
//     digest  visits all parameters, as publishing does
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <malloc.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <ctime>
#include <fstream>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "common/base/machine/rank_environment.h"
#include "common/loss/logits/linear_cross_entropy.h"
#include "common/parallel/create_strategy.h"
#include "common/parallel/whole_parameters.h"
#include "services/training_core/service/testing/resolved_options.h"
#include "tests/bench/programs/status_bytes.h"

namespace {

using nlohmann::json;
using tandem::parallel::Strategy;

template <typename Result>
void Check(const Result& result) {
  if (result.ok()) return;
  std::cerr << result << std::endl;
  std::exit(1);
}

struct Options {
  std::string model, export_directory;
  int64_t micro_batches = 4, sequences = 4, tokens = 256;  // sequences of a micro-batch
  tandem::training::TrainingOptions training;  // strategy, optimizer and timeouts are used
};

Options Parse(int argc, char** argv) {
  Options options;
  std::vector<std::string> settings;
  CLI::App app("Training of a model on some ranks, timed on request");
  app.add_option("--model", options.model)->required();
  app.add_option("--export-directory", options.export_directory);
  app.add_option("--micro-batches", options.micro_batches);
  app.add_option("--sequences", options.sequences);
  app.add_option("--tokens", options.tokens);
  app.add_option("settings", settings, "Settings of a trainer: strategy.name=zero");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    std::exit(app.exit(error));
  }
  tandem::training::SetResolvedOptions(options.model, settings, &options.training);
  return options;
}

class Bench {
 public:
  Bench(const Options& options, std::shared_ptr<tandem::ranks::Communicator> world)
      : options_(options), world_(std::move(world)) {
    auto created = tandem::parallel::CreateStrategy(options.training.strategy, world_);
    Check(created.status());
    strategy_ = *std::move(created);
    Check(strategy_->LoadModel(options.model, {.requires_grad = true}));
    Check(strategy_->BuildOptimizer(options.training.optimizer));
  }

  json Do(const std::string& what) {
    if (what == "step") {
      const int64_t sent = world_->total_sent_bytes();
      const auto begin = std::chrono::steady_clock::now();
      const std::clock_t cpu = std::clock();
      Step();
      const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
      return {{"seconds", seconds.count()},
              {"cpu_seconds", static_cast<double>(std::clock() - cpu) / CLOCKS_PER_SEC},
              {"sent_bytes", world_->total_sent_bytes() - sent}};
    }
    if (what == "memory") {
      malloc_trim(0);  // freed memory does not count as held
      json memory = {
          {"bytes", tandem::StatusBytes("RssAnon") - before_},
          {"peak_bytes", tandem::StatusBytes("VmHWM") - tandem::StatusBytes("RssFile") - before_}};
      std::ofstream("/proc/self/clear_refs") << "5";
      return memory;
    }
    if (what == "export") {
      Export();
      return json::object();
    }
    if (what == "digest") {
      Check(ParametersDigest(*strategy_).status());
      return json::object();
    }
    std::cerr << "unknown: " << what << std::endl;
    std::exit(1);
  }

 private:
  tandem::RaggedBatch Input() const {
    std::vector<std::vector<int64_t>> sequences;
    for (int64_t s = 0; s < options_.sequences; ++s) {
      sequences.emplace_back();
      for (int64_t t = 0; t < options_.tokens; ++t) {
        sequences.back().push_back((7919 * (t + 1) + 104729 * s) %
                                   strategy_->model().num_token_ids());
      }
    }
    return tandem::MakeRaggedBatch(sequences);
  }

  absl::StatusOr<at::Tensor> Loss(const tandem::RaggedBatch& batch, const at::Tensor& hidden) {
    tandem::loss::OutputRows rows;
    const at::Tensor tokens = batch.tokens.cpu();
    for (int64_t row = 0; row < hidden.size(0); ++row) {
      if (row % options_.tokens == options_.tokens - 1) continue;
      rows.positions.push_back(row);
      rows.labels.push_back(tokens.const_data_ptr<int64_t>()[row + 1]);
    }
    const tandem::parallel::OutputShard shard = strategy_->output_shard();
    const auto loss = tandem::loss::LinearCrossEntropyLoss::Create(
        shard.weight, {.vocabulary = shard.vocabulary, .soft_cap = shard.soft_cap});
    Check(loss.status());
    tandem::loss::OutputGradients gradients = {.hidden = at::zeros_like(hidden.detach()),
                                               .weight = strategy_->OutputGradient()};
    const double scale = 1.0 / static_cast<double>(rows.labels.size() * options_.micro_batches);
    const absl::Status status = (*loss)->ForwardBackward(
        hidden.detach(), rows,
        [&](int64_t, absl::Span<const double>, absl::Span<const double>, absl::Span<double> c,
            absl::Span<double>) {
          for (double& x : c) x = -scale;
          return absl::OkStatus();
        },
        gradients);
    if (!status.ok()) return status;
    return gradients.hidden;
  }

  void Step() {
    Check(strategy_->ForwardBackward(
        options_.micro_batches, [&](int64_t) { return Input(); },
        [&](int64_t, const tandem::RaggedBatch& batch, const at::Tensor& hidden) {
          return Loss(batch, hidden);
        }));
    Check(strategy_->OptimizerStep({}).status());
  }

  void Export() {
    Check(tandem::parallel::UseWholeParameters(*strategy_, [&](tandem::TensorSource parameters) {
      return strategy_->model().Save(options_.export_directory, tandem::DType::kBFloat16,
                                     parameters);
    }));
  }

  const Options options_;
  const int64_t before_ = tandem::StatusBytes("RssAnon");
  const std::shared_ptr<tandem::ranks::Communicator> world_;
  std::unique_ptr<Strategy> strategy_;
};

}  // namespace

int main(int argc, char** argv) {
  const Options options = Parse(argc, argv);
  at::set_num_threads(1);
  const auto environment = tandem::ReadRankEnvironment();
  Check(environment.status());
  auto world = tandem::ranks::Communicator::Connect(
      *environment, {.timeout = options.training.rank_timeouts.collective});
  Check(world.status());
  Bench bench(options, *world);
  std::cout << json({{"ready", true}}) << std::endl;
  for (std::string what; std::getline(std::cin, what);) std::cout << bench.Do(what) << std::endl;
  (*world)->Barrier();
}
