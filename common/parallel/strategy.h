// How training is laid out over processes. Trainer and critic see only this interface; the same
// batch gives the same result under every strategy. docs/adr/0019 says why it is cut like this.
//
// Every rank of a server makes the same calls with the same arguments, in the same order. What a
// call computes, and where, is the strategy's: functions that it is handed are called on the ranks
// that hold what they need.
#ifndef TANDEM_COMMON_PARALLEL_STRATEGY_H_
#define TANDEM_COMMON_PARALLEL_STRATEGY_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "common/model/model.h"
#include "common/model/ragged_batch.h"
#include "common/ops/tensor_parallel_group.h"
#include "common/parallel/communicator.h"
#include "common/tensor/named_tensors.h"
#include "common/training/optimizer_options.h"

namespace tandem::parallel {

// What an optimizer step did.
struct OptimizerReport {
  double grad_norm = 0;      // of the whole gradient, before clipping
  double learning_rate = 0;  // that was used
};

// What the model reads in a pass: micro-batch i, whole sequences, on the model's device.
using InputFunction = absl::FunctionRef<RaggedBatch(int64_t micro_batch)>;

// Numbers that are computed from a micro-batch's hidden states [T, H].
using OutputFunction = absl::FunctionRef<absl::StatusOr<std::vector<double>>(
    int64_t micro_batch, const RaggedBatch& batch, const at::Tensor& hidden)>;

// d loss / d hidden of a micro-batch: [T, H], in the type of `hidden`, which is a leaf; undefined
// where `hidden` requires no gradient. The loss is already scaled for the *global* batch
// (common/loss/loss_scale.h), so that gradients simply add up. What it has by parameters of the
// head it adds to Strategy::Gradient.
using LossFunction = absl::FunctionRef<absl::StatusOr<at::Tensor>(
    int64_t micro_batch, const RaggedBatch& batch, const at::Tensor& hidden)>;

// What a rank computes of a language model's output.
struct OutputShard {
  at::Tensor weight;  // [V / n, H]: its rows of the head, in the type of the computation
  // The n ranks that share out the vocabulary, in the order of its rows; nullptr: one has all of
  // it. For loss::LinearCrossEntropyOptions.
  std::shared_ptr<ops::TensorParallelGroup> group;
};

// Lifetime: LoadModel and BuildOptimizer once, then passes and OptimizerStep by turns. Not
// thread-safe. Exceptions of libtorch become INTERNAL.
class Strategy {
 public:
  virtual ~Strategy() = default;

  // Loads this rank's part of the model. Errors as Model::Load.
  virtual absl::Status LoadModel(const std::string& directory, const LoadOptions& options) = 0;
  // Its passes are the strategy's to run; the rest may be asked.
  virtual Model& model() = 0;
  // For the parameters that require gradients. INVALID_ARGUMENT for options that do not fit, or if
  // nothing trains.
  virtual absl::Status BuildOptimizer(const OptimizerOptions& options) = 0;

  // This process among those that make the same calls. Rank 0 speaks for all: to clients, to disk.
  virtual Communicator& ranks() = 0;

  // How many micro-batches are run at a time.
  virtual int64_t data_parallel_size() const { return 1; }

  // Whether functions of hidden states are ever called on this rank.
  virtual bool computes_output() const { return true; }
  // Of a language model; without a weight where computes_output() is false. Valid as long as the
  // model.
  virtual OutputShard output_shard() {
    return {.weight = model().lm_head().compute_weight(), .group = nullptr};
  }

  // Runs micro-batches 0 .. count-1 without gradients. What `output` says of each, on every rank.
  virtual absl::StatusOr<std::vector<std::vector<double>>> Forward(int64_t count,
                                                                   InputFunction input,
                                                                   OutputFunction output) = 0;

  // What `compute` says of 0 .. count-1, on every rank; it is called once for each, on any rank.
  virtual absl::StatusOr<std::vector<std::vector<double>>> ShareOut(
      int64_t count,
      absl::FunctionRef<absl::StatusOr<std::vector<double>>(int64_t index)> compute) = 0;

  // Zeroes the main gradients and adds those of micro-batches 0 .. count-1. The first error ends
  // it.
  virtual absl::Status ForwardBackward(int64_t count, InputFunction input, LossFunction loss) = 0;

  // The main gradient (fp32) of a parameter: autograd adds to it, and a loss function may while it
  // runs. Of the head's matrix the rows of output_shard(). Undefined if there is no such parameter
  // here, or if it is frozen.
  virtual at::Tensor Gradient(absl::string_view parameter) const = 0;

  // Replaces numbers that the loss function has counted, on the ranks that it ran on, by their sums
  // and maxima over all micro-batches.
  virtual absl::Status Reduce(absl::Span<double> sums, absl::Span<double> maxima) = 0;

  // Clips by global norm with factor min(1, max_grad_norm / (norm + 1e-6)) and updates.
  // NotFiniteError, with nothing changed, for the norm. DATA_LOSS if the update broke off, with
  // some of the parameters changed. After any other error optimizer_steps() tells whether the
  // update was done; if so, the model's OnWeightsChanged may not have been.
  virtual absl::StatusOr<OptimizerReport> OptimizerStep() = 0;

  virtual int64_t optimizer_steps() const = 0;
  // Forgets every update: as after BuildOptimizer.
  virtual absl::Status ResetOptimizer() = 0;

  // Calls `visit` on rank 0 with every whole parameter, the frozen ones too, in the order of
  // Model::Parameters; beside its part, a rank holds one block at a time. An error of `visit` is
  // that of all ranks.
  virtual absl::Status VisitParameters(TensorVisitor visit) = 0;
  // Replaces parameters by whole ones. All or nothing; INVALID_ARGUMENT names the tensor.
  virtual absl::Status ScatterParameters(const NamedTensors& parameters) = 0;

  // Writes or reads the optimizer's state inside a checkpoint directory. DATA_LOSS names the tensor
  // that does not fit (the checkpoint of another model, or of another freeze); then nothing has
  // changed.
  virtual absl::Status SaveOptimizer(const std::string& directory) = 0;
  virtual absl::Status LoadOptimizer(const std::string& directory) = 0;
};

}  // namespace tandem::parallel

#endif  // TANDEM_COMMON_PARALLEL_STRATEGY_H_
