// A loss of the output layer, forward and backward, as a process that bench_loss.py times beside
// its peers. It executes every word of its input as a command, and answers with one line, the
// seconds that it took or the bytes:
//
//     tandem-loss-bench --loss cross_entropy --rows 2048 --hidden 576 --vocabulary 49152
//     loss         forward and backward of all rows
//     peak         matrix products with as many operations, in the fastest shapes
//     extra_bytes  peak of memory during `loss`, beyond that before it: resident, or of the GPU
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <c10/core/CachingDeviceAllocator.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <cmath>
#include <iostream>
#include <string>
#include <vector>

#include "common/loss/logits/linear_cross_entropy.h"
#include "common/loss/logits/linear_divergence.h"
#include "common/loss/supervised_loss.h"
#include "common/ops/ops.h"
#include "tests/bench/programs/status_bytes.h"

namespace {

using tandem::loss::DivergenceKind;
using tandem::loss::LinearCrossEntropyLoss;
using tandem::loss::LinearDivergenceLoss;
using tandem::loss::LossMode;

struct Options {
  int64_t rows = 2048, hidden = 576, vocabulary = 49152, threads = 2;
  int64_t logits_chunk_bytes = 48 << 20;
  double weightless = 0;  // fraction of the rows that are left out
  std::string loss = "cross_entropy", dtype = "float32", kernels = "auto";
  std::string impl = "auto", mode = "auto", device = "cpu";  // for cross_entropy only
};

Options Parse(int argc, char** argv) {
  Options options;
  CLI::App app("One loss of the output layer, timed on request");
  app.add_option("--loss", options.loss)
      ->check(CLI::IsMember({"cross_entropy", "reverse_kl", "forward_kl"}));
  app.add_option("--rows", options.rows);
  app.add_option("--hidden", options.hidden);
  app.add_option("--vocabulary", options.vocabulary);
  app.add_option("--threads", options.threads);
  app.add_option("--logits-chunk-bytes", options.logits_chunk_bytes);
  app.add_option("--weightless", options.weightless);
  app.add_option("--kernels", options.kernels)->check(CLI::IsMember({"auto", "aten"}));
  app.add_option("--impl", options.impl);
  app.add_option("--device", options.device);
  app.add_option("--dtype", options.dtype)->check(CLI::IsMember({"float32", "bfloat16"}));
  app.add_option("--mode", options.mode)
      ->check(CLI::IsMember({"auto", "gradient_in_forward", "recompute"}));
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    std::exit(app.exit(error));
  }
  return options;
}

LossMode ModeOf(const std::string& name) {
  if (name == "gradient_in_forward") return LossMode::kGradientInForward;
  return name == "recompute" ? LossMode::kRecompute : LossMode::kAuto;
}

class Bench {
 public:
  explicit Bench(const Options& options)
      : options_(options),
        dtype_(options.dtype == "float32" ? at::kFloat : at::kBFloat16),
        hidden_(at::randn({options.rows, options.hidden}).to(at::Device(options.device), dtype_)),
        weight_((at::randn({options.vocabulary, options.hidden}) * 0.02)
                    .to(at::Device(options.device), dtype_)),
        gradients_{
            .hidden = at::zeros({options.rows, options.hidden}, at::Device(options.device)),
            .weight = at::zeros({options.vocabulary, options.hidden}, at::Device(options.device))} {
    const at::Tensor labels = at::randint(options.vocabulary, {options.rows}, at::kLong);
    const auto left_out =
        static_cast<int64_t>(options.weightless * static_cast<double>(options.rows));
    for (int64_t row = left_out; row < options.rows; ++row) {
      rows_.positions.push_back(row);
      rows_.labels.push_back(labels[row].item<int64_t>());
    }
    scales_.assign(rows_.positions.size(), 1.0 / static_cast<double>(rows_.positions.size()));
    options.loss == "cross_entropy" ? MakeCrossEntropy() : MakeDivergence();
  }

  void Loss() {
    const absl::Status status = divergence_ == nullptr ? CrossEntropy() : Divergence();
    if (!status.ok()) throw std::runtime_error(std::string(status.message()));
  }

  // Multiplies square matrices, which suit the caches, with as many operations as `Loss` has.
  void Peak() {
    constexpr int64_t kSide = 2048;
    const double products = divergence_ == nullptr ? 3 : 4;
    const double operations = 2.0 * products * static_cast<double>(rows_.positions.size()) *
                              static_cast<double>(options_.hidden * options_.vocabulary);
    const int64_t times = std::llround(operations / (2.0 * kSide * kSide * kSide));
    if (!square_.defined()) {
      square_ = at::randn({kSide, kSide}).to(hidden_.device(), dtype_);
      product_ = at::empty_like(square_);
    }
    for (int64_t i = 0; i < times; ++i) at::mm_out(product_, square_, square_);
  }

  int64_t ExtraBytes() {
    if (hidden_.is_cuda()) return ExtraBytesOfGpu();
    const int64_t before = tandem::StatusBytes("VmRSS");
    std::ofstream("/proc/self/clear_refs") << "5";  // restarts VmHWM
    Loss();
    return tandem::StatusBytes("VmHWM") - before;
  }

  void Sync() {
    if (hidden_.is_cuda()) gradients_.hidden.sum().item<float>();
  }

 private:
  int64_t ExtraBytesOfGpu() {
    constexpr auto kAll = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    c10::DeviceAllocator& memory = *at::getDeviceAllocator(at::kCUDA);
    const at::DeviceIndex device = hidden_.device().index();
    const int64_t before = memory.getDeviceStats(device).allocated_bytes[kAll].current;
    memory.resetPeakStats(device);
    Loss();
    return memory.getDeviceStats(device).allocated_bytes[kAll].peak - before;
  }

  void MakeCrossEntropy() {
    loss_ = LinearCrossEntropyLoss::Create(
                weight_, {.impl = tandem::loss::ParseLossImpl(options_.impl).value(),
                          .logits_chunk_bytes = options_.logits_chunk_bytes})
                .value();
    std::cerr << "fused output loss: " << LossImplName(loss_->impl()) << " (" << loss_->reason()
              << "), " << loss_->chunk_rows() << " rows a chunk\n";
  }

  // The teacher is as large as the student.
  void MakeDivergence() {
    teacher_hidden_ = at::randn_like(hidden_);
    teacher_weight_ = at::randn_like(weight_).mul_(0.02);
    divergence_ = LinearDivergenceLoss::Create(weight_, teacher_weight_,
                                               {.logits_chunk_bytes = options_.logits_chunk_bytes})
                      .value();
    std::cerr << "divergence: " << divergence_->chunk_rows() << " rows a chunk\n";
  }

  absl::Status CrossEntropy() {
    tandem::loss::SupervisedLossEvaluator evaluator(scales_);
    return loss_->ForwardBackward(
        hidden_, rows_, [&](auto... arguments) { return evaluator.Evaluate(arguments...); },
        gradients_, ModeOf(options_.mode));
  }

  absl::Status Divergence() {
    const DivergenceKind kind =
        options_.loss == "reverse_kl" ? DivergenceKind::kReverse : DivergenceKind::kForward;
    return divergence_
        ->ForwardBackward(hidden_, teacher_hidden_, {.positions = rows_.positions}, {.kind = kind},
                          scales_, gradients_)
        .status();
  }

  const Options options_;
  const at::ScalarType dtype_;
  const at::Tensor hidden_, weight_;
  at::Tensor teacher_hidden_, teacher_weight_;
  tandem::loss::OutputGradients gradients_;
  tandem::loss::OutputRows rows_;
  std::vector<double> scales_;
  // Exactly one of the two losses is set.
  std::unique_ptr<LinearCrossEntropyLoss> loss_;
  std::unique_ptr<LinearDivergenceLoss> divergence_;
  at::Tensor square_, product_;
};

}  // namespace

int main(int argc, char** argv) {
  const Options options = Parse(argc, argv);
  at::set_num_threads(static_cast<int>(options.threads));
  at::manual_seed(0);
  if (options.kernels == "aten") tandem::ops::SetKernelPath(tandem::ops::KernelPath::kAten);
  Bench bench(options);
  for (std::string command; std::cin >> command;) {
    if (command == "extra_bytes") {
      std::cout << bench.ExtraBytes() << std::endl;
      continue;
    }
    const auto start = std::chrono::steady_clock::now();
    command == "peak" ? bench.Peak() : bench.Loss();
    bench.Sync();
    std::cout << std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count()
              << std::endl;
  }
}
