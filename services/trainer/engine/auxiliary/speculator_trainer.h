// Training of a speculator beside the trainer's model, on the hidden states of the same passes, or
// alone on those of a frozen model.
//
// Every rank holds the whole speculator, also a rank whose passes end before the output layer: one
// sum over all ranks then gives each of them the gradient, all make the same update, and rank 0 can
// write the checkpoint under every layout.
#ifndef TANDEM_SERVICES_TRAINER_ENGINE_AUXILIARY_SPECULATOR_TRAINER_H_
#define TANDEM_SERVICES_TRAINER_ENGINE_AUXILIARY_SPECULATOR_TRAINER_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/optim/adamw.h"
#include "common/speculator/adapters/speculator_adapter.h"
#include "common/tensor/aten/named_tensors.h"
#include "services/trainer/engine/steps/training_rows.h"
#include "services/trainer/engine/types.h"
#include "services/training_core/companion.h"
#include "services/training_core/training_core.h"

namespace tandem::trainer {

class SpeculatorTrainer final : public training::Companion {
 public:
  // Makes or loads the speculator that `options` name for `core`'s model. Errors name the field
  // ("n_predict").
  static absl::StatusOr<std::unique_ptr<SpeculatorTrainer>> Create(const EngineOptions& options,
                                                                   training::TrainingCore& core);

  const speculator::Speculator& speculator() const { return adapter_->speculator(); }

  // Whether the samples `range` of the batch have anything to learn from.
  bool HasTargets(const TrainingRows& rows, const training::SequenceRange& range) const;

  // The gradients of one update, over the samples `range` of the batch: BeginUpdate, then
  // AddGradients for each micro-batch whose `hidden` states this rank has, then FinishUpdate on all
  // ranks. All tokens of prompts and responses are targets, as far as hidden states that the step
  // computes can predict them.
  void BeginUpdate(const TrainingRows& rows, const training::SequenceRange& range);
  absl::Status AddGradients(const TrainingRows& rows, const training::MicroBatchInput& input,
                            const at::Tensor& hidden);
  // Adds up gradients and reports of all ranks, and replaces the metrics of a former update. A
  // gradient that is not finite leaves the speculator's update out, not the step; it is a
  // NotFiniteError where the model is frozen and the speculator's update is the whole step. Without
  // a target there is no update and no metric.
  absl::Status FinishUpdate(std::map<std::string, double>& metrics);

  absl::Status Update() override;
  int64_t updates() const override { return optimizer_->steps(); }
  absl::Status Save(const std::string& directory) override;
  absl::StatusOr<training::CompanionWriter> Copy(TensorCopies& copies) override;
  absl::Status ReadCheckpoint(const training::LoadRequest& request, bool intact) override;
  absl::Status ReadInitial() override;
  std::string initial_directory() const override { return path_; }
  void Adopt() override;

 private:
  // Values and moments that were read and are not yet in use.
  struct Staged {
    std::unique_ptr<speculator::Speculator> values;  // null: the present ones stay
    std::optional<NamedTensors> moments;             // nullopt: none yet
  };

  SpeculatorTrainer(const EngineOptions& options, training::TrainingCore& core,
                    std::unique_ptr<speculator::SpeculatorAdapter> adapter,
                    loss::LinearCrossEntropyOptions output_loss);
  // Returns how many tokens of sequence s of the batch the speculator reads: all, or those that its
  // last head predicts from the last hidden state.
  int64_t ReadTokens(const TrainingRows& rows, size_t s) const;
  // Returns the number of targets of each head.
  int64_t CountTargets(const TrainingRows& rows, const training::SequenceRange& range) const;
  int64_t n_predict() const { return adapter_->speculator().sizes().n_predict; }

  const OptimizerOptions options_;
  const std::string path_;  // of the initial weights; empty: they are drawn
  training::TrainingCore& core_;
  const std::unique_ptr<speculator::SpeculatorAdapter> adapter_;
  speculator::SpeculatorLossOptions loss_options_;
  at::Tensor gradient_;                // flat; those of the parameters are views of it
  std::vector<at::Tensor> gradients_;  // of the parameters
  std::unique_ptr<training::AdamW> optimizer_;
  const std::string initial_digest_;
  Staged staged_;

  // The update in progress:
  int64_t targets_ = 0;                 // of each head, in the whole update
  std::vector<double> loss_, correct_;  // of each head: sums over this rank's micro-batches
  bool complete_ = false;               // whether the gradient may be applied
};

}  // namespace tandem::trainer

#endif  // TANDEM_SERVICES_TRAINER_ENGINE_AUXILIARY_SPECULATOR_TRAINER_H_
