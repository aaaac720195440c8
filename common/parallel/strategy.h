// The interface of a training layout: how a model's parameters, gradients, optimizer state and
// micro-batches are distributed over the ranks of a server. Trainer and critic see only this
// interface; the same batch gives the same result under every strategy.
//
// A newcomer to this room begins here. create_strategy.cc chooses among single_strategy.h,
// zero_strategy.h and megatron_strategy.h. All three run a model with block_pass.h and train it
// with optimizer/sharded_optimizer.h; `megatron` adds parallel_mesh.h, pipeline_schedule.h,
// stage_pass.h and context/. docs/internals/architecture.md draws the layouts, docs/adr/0019 gives
// the reasons.
//
// Every rank of a server makes the same calls with the same arguments, in the same order. The
// strategy decides what is computed on which rank; it calls the functions that it is handed on the
// ranks that hold what they read.
#ifndef TANDEM_COMMON_PARALLEL_STRATEGY_H_
#define TANDEM_COMMON_PARALLEL_STRATEGY_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "common/loss/logits/vocabulary_shard.h"
#include "common/model/model.h"
#include "common/model/passes/ragged_batch.h"
#include "common/optim/optimizer_options.h"
#include "common/parallel/parameter_range.h"
#include "common/ranks/communicator.h"
#include "common/tensor/aten/named_tensors.h"
#include "common/tensor/aten/tensor_copies.h"

namespace tandem::parallel {

class ShardedOptimizer;

// The result of an optimizer step.
struct OptimizerReport {
  double grad_norm = 0;      // of the whole gradient, before clipping
  double learning_rate = 0;  // used by this step
};

// Returns the tokens that the model reads in a micro-batch: whole sequences, on the model's device.
using InputFunction = absl::FunctionRef<RaggedBatch(int64_t micro_batch)>;

// Returns numbers computed from a micro-batch's hidden states [T, H].
using OutputFunction = absl::FunctionRef<absl::StatusOr<std::vector<double>>(
    int64_t micro_batch, const RaggedBatch& batch, const at::Tensor& hidden)>;

// Returns d loss / d hidden of a micro-batch: [T, H], in the type of `hidden`, which is a leaf;
// undefined where `hidden` requires no gradient. The loss is already scaled for the *global* batch
// (common/loss/loss_scale.h), so that gradients simply add up. The function adds its gradients of
// the head's parameters to Strategy::OutputGradient itself.
using LossFunction = absl::FunctionRef<absl::StatusOr<at::Tensor>(
    int64_t micro_batch, const RaggedBatch& batch, const at::Tensor& hidden)>;

// The rows of a language model's output layer that a rank computes: only those of token ids, not
// the padding rows behind them.
struct OutputShard {
  ops::MatrixRows weight;  // [rows, H], in the type of the computation or packed
  loss::VocabularyShard vocabulary;
  std::optional<double> soft_cap = std::nullopt;  // of the logits (LinearCrossEntropyOptions)
};

// Writes the optimizer's state on one rank into a checkpoint directory.
using OptimizerWriter = std::function<absl::Status(const std::string& directory)>;

// Lifetime: LoadModel and BuildOptimizer once, then passes and OptimizerStep in turns. A model that
// is frozen (LoadOptions::freeze_all) has no optimizer: neither BuildOptimizer nor ForwardBackward
// is called, nor anything of the optimizer. Not thread-safe. Exceptions of libtorch become
// INTERNAL.
class Strategy {
 public:
  virtual ~Strategy() = default;

  // Loads this rank's shard of the model. Errors as Model::Load.
  virtual absl::Status LoadModel(const std::string& directory, const LoadOptions& options) = 0;
  // The model of this rank. Only the strategy runs passes on it; everything else may be asked.
  virtual Model& model() = 0;
  // Builds the optimizer of the parameters that require gradients. INVALID_ARGUMENT for options out
  // of range, or if no parameter trains.
  virtual absl::Status BuildOptimizer(const OptimizerOptions& options) = 0;

  // The ranks that make the same calls. Rank 0 alone talks to clients and writes manifests.
  virtual ranks::Communicator& ranks() = 0;

  // Number of micro-batches that run at the same time.
  virtual int64_t data_parallel_size() const { return 1; }

  // Whether functions of hidden states are ever called on this rank.
  virtual bool computes_output() const { return true; }
  // The output layer of a language model; without a weight where computes_output() is false. Valid
  // as long as the model.
  virtual OutputShard output_shard() {
    return {
        .weight = model().output_weight(), .vocabulary = {}, .soft_cap = model().logit_soft_cap()};
  }
  // The main gradient of output_shard().weight: a view of that of its parameter. Undefined if the
  // parameter is frozen.
  virtual at::Tensor OutputGradient() {
    const at::Tensor gradient = Gradient(model().lm_head_name());
    return gradient.defined() ? gradient.narrow(0, 0, model().num_token_ids()) : gradient;
  }

  // Runs micro-batches 0 .. count-1 without gradients and returns all results of `output`, on every
  // rank.
  virtual absl::StatusOr<std::vector<std::vector<double>>> Forward(int64_t count,
                                                                   InputFunction input,
                                                                   OutputFunction output) = 0;

  // Runs compute(0) .. compute(count-1), each on exactly one rank, and returns all results on every
  // rank.
  virtual absl::StatusOr<std::vector<std::vector<double>>> ParallelMap(
      int64_t count,
      absl::FunctionRef<absl::StatusOr<std::vector<double>>(int64_t index)> compute) = 0;

  // Zeroes the main gradients and adds those of micro-batches 0 .. count-1. Stops at the first
  // error and returns it.
  virtual absl::Status ForwardBackward(int64_t count, InputFunction input, LossFunction loss) = 0;

  // Returns the main gradient (fp32) of the rank's shard of a parameter, to which autograd adds,
  // and to which a loss function may add while it runs. Undefined if this rank has no such
  // parameter, or if it is frozen.
  virtual at::Tensor Gradient(absl::string_view parameter) const = 0;

  // Replaces numbers that the loss function has counted, on the ranks that it ran on, by their sums
  // and maxima over all micro-batches.
  virtual absl::Status Reduce(absl::Span<double> sums, absl::Span<double> maxima) = 0;

  // Adds up a tensor that the loss function has filled on the ranks that it ran on, such as the
  // gradient of a small model that every rank holds whole: afterwards all ranks have the same bits.
  // Every rank gives the same shape and type; what it holds on ranks that the loss function did not
  // run on is ignored.
  virtual absl::Status ReduceTensor(at::Tensor& sums) = 0;

  // Clips by global norm with factor min(1, max_grad_norm / (norm + 1e-6)) and updates, with the
  // options of BuildOptimizer where `overrides` has no others.
  // NotFiniteError, with nothing changed, if the norm is not finite. DATA_LOSS if the update broke
  // off with some parameters changed. After any other error optimizer_steps() tells whether the
  // update was done; if so, the model's OnWeightsChanged may not have been called.
  virtual absl::StatusOr<OptimizerReport> OptimizerStep(const OptimizerOverrides& overrides) = 0;

  virtual int64_t optimizer_steps() const;
  // Returns the optimizer to its state after BuildOptimizer.
  absl::Status ResetOptimizer();

  // Returns ranks that together hold every value of a parameter (of Model::DeclaredParameters)
  // once; the same on every rank. `wanted_by` is the rank that wants the whole: it is among them if
  // it holds any, and alone if it holds all.
  virtual std::vector<Holding> Holdings(const Parameter& parameter, int wanted_by) const = 0;
  // Returns this rank's values of a parameter, float32: its shard of it, or flat the range that
  // Holdings says. Undefined if it holds none, and for a packed parameter (Model::IsPacked), whose
  // values are those of the model's files. They share memory with the model.
  virtual at::Tensor HeldValues(const Parameter& parameter) const;
  // Returns the part of a whole parameter that has the values of HeldValues: a view of `whole`,
  // whose other values need not be read.
  virtual at::Tensor PartOf(const at::Tensor& whole, const Parameter& parameter) const;

  // Calls `visit` on rank 0 with every whole parameter, frozen ones included, in the order of
  // Model::Parameters. Rank 0 holds one of them at a time. An error of `visit` is returned on all
  // ranks.
  absl::Status VisitParameters(TensorVisitor visit);
  // Replaces all parameters by whole ones, of which every rank reads what it holds (PartOf). All or
  // nothing; INVALID_ARGUMENT names the tensor.
  virtual absl::Status LoadParameters(const NamedTensors& parameters);

  // Writes the optimizer's state into a checkpoint directory, or reads it. DATA_LOSS names the
  // tensor that does not fit (another model's checkpoint, or another `freeze`); nothing has changed
  // then.
  virtual absl::Status SaveOptimizer(const std::string& directory);
  // Adds copies of what SaveOptimizer writes on this rank to `copies`. Returns what writes them
  // into a directory, when they have their values: it may run on another thread, while the model
  // trains.
  virtual absl::StatusOr<OptimizerWriter> CopyOptimizer(TensorCopies& copies);
  absl::Status LoadOptimizer(const std::string& directory);

 protected:
  // LoadParameters has replaced the values.
  virtual void OnParametersReplaced() { model().OnWeightsChanged(); }
  // The optimizer that BuildOptimizer made.
  virtual ShardedOptimizer& optimizer() const = 0;
};

}  // namespace tandem::parallel

#endif  // TANDEM_COMMON_PARALLEL_STRATEGY_H_
