// The optimizer of a rank that updates pieces of parameters: those of flat buffers that ranks share
// out, or whole ones of a part of the model.
#ifndef TANDEM_COMMON_PARALLEL_PIECE_OPTIMIZER_H_
#define TANDEM_COMMON_PARALLEL_PIECE_OPTIMIZER_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/model/model.h"
#include "common/parallel/communicator.h"
#include "common/parallel/optimizer_state.h"
#include "common/parallel/strategy.h"
#include "common/training/adamw.h"
#include "common/training/optimizer_options.h"

namespace tandem::parallel {

// Whether any parameter of a block trains.
bool BlockTrains(const Model& model, int64_t block);

// Makes the gradients of a block's parameters views of `gradients`, as the parameters are of the
// block's buffer.
void ViewGradients(const Model& model, int64_t block, const at::Tensor& gradients);

struct OptimizerPiece {
  StateSlice slice;
  at::Tensor values, gradient;  // [slice.numel], float32
  // Of ranks that update the same values alike, one counts them: in the norm of the gradient and in
  // checkpoints.
  bool counts = true;
};

// What trains of a block, of which this rank updates part `index` of `parts` equal ones:
// `values` and `gradients`, flat.
std::vector<OptimizerPiece> PiecesOfBlock(const Model& model, int64_t block, int64_t parts,
                                          int64_t index, const at::Tensor& values,
                                          const at::Tensor& gradients);

class PieceOptimizer {
 public:
  // `ranks` are all that train the model; every rank makes the same calls. On the CPU its state and
  // copies of the values are kept and updated there, wherever the pieces are.
  PieceOptimizer(std::vector<OptimizerPiece> pieces, const OptimizerOptions& options,
                 const Model& model, std::shared_ptr<Communicator> ranks, bool on_cpu = false);

  // Strategy::OptimizerStep; `then` is called after the update of the pieces.
  absl::StatusOr<OptimizerReport> Step(Model& model, absl::FunctionRef<void()> then);
  int64_t steps() const { return optimizer_->steps(); }
  void Reset() { optimizer_->Reset(); }
  // The values have been replaced.
  void OnValuesReplaced();

  // As the methods of Strategy.
  absl::Status Save(const std::string& directory) const;
  absl::Status Load(const std::string& directory);

 private:
  double GradientNorm() const;
  void Update(double learning_rate);

  const OptimizerOptions options_;
  const std::shared_ptr<Communicator> ranks_;
  const std::vector<OptimizerPiece> pieces_;
  std::vector<std::string> trained_;   // of the whole model
  std::vector<at::Tensor> gradients_;  // of the pieces
  std::vector<at::Tensor> masters_;    // their values, or copies on the CPU
  std::unique_ptr<training::AdamW> optimizer_;
};

}  // namespace tandem::parallel

#endif  // TANDEM_COMMON_PARALLEL_PIECE_OPTIMIZER_H_
