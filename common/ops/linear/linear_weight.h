// The weight of a linear map or a head, and its product with hidden states.
#ifndef TANDEM_COMMON_OPS_LINEAR_LINEAR_WEIGHT_H_
#define TANDEM_COMMON_OPS_LINEAR_LINEAR_WEIGHT_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "common/ops/linear/low_rank_adapter.h"
#include "common/ops/products/linear_tile.h"
#include "common/ops/products/matrix_rows.h"
#include "common/ops/products/packed_weight.h"
#include "common/ops/shards/tensor_parallel_group.h"

namespace tandem::ops {

// One or several maps of one input (queries, keys and values), stacked in one matrix so that they
// are one product. The parameters are the *masters*: views of the stack, one per map. Where the
// computation has another type than the masters (bf16 over fp32), the products use a copy in that
// type; where weights are rounded, the products use a copy with the rounded values. Gradients with
// respect to a copy are those of the masters. OnWeightsChanged() refreshes the copy; using a stale
// copy throws c10::Error.
//
// Maps that do not train may be packed instead (packed_weight.h): then there are no masters, x is
// float32, and a gradient flows into x alone.
//
// Maps may round their inputs: float32 x is rounded to bf16 and multiplied by weights in bf16, with
// float32 sums (bfloat16_linear.h). Gradients are products of the rounded x, the weights, and
// rounded gradients of the results, summed in float32: the straight-through estimator.
//
// Maps may have low-rank adapters. Their products are added to those of the maps in functions named
// Forward…, and a row has the same bits with autograd and without.
class LinearWeight {
 public:
  // `stacked` [sum of outs, in] and `bias` [sum of outs] (or undefined) hold the maps one after the
  // other. `weights` [outs[i], in] and `biases` (empty, or [outs[i]]) are views of them, the
  // parameters; they are leaves of autograd where they train. With `rounds` the products use a copy
  // of the matrix with the values of bfloat16; masters must then be float32 on the CPU. With a
  // computation in float32 the copy is of that type (CopyRounded), with one in bfloat16 the maps
  // round their inputs. The bias is not rounded. `copy` (or undefined) is memory for the matrix in
  // a `compute_dtype` other than that of the masters.
  LinearWeight(at::Tensor stacked, at::Tensor bias, std::vector<at::Tensor> weights,
               std::vector<at::Tensor> biases, at::ScalarType compute_dtype, bool rounds = false,
               at::Tensor copy = {});
  // The same with copies, like `stacked` and `bias`, that the caller keeps up to date.
  LinearWeight(at::Tensor stacked, at::Tensor bias, std::vector<at::Tensor> weights,
               std::vector<at::Tensor> biases, at::Tensor compute_weight, at::Tensor compute_bias);

  // Maps that are packed one after the other in `packed`. `bias` and `biases` as above, in float32.
  // Maps that round their inputs are packed in bfloat16.
  LinearWeight(std::shared_ptr<const PackedWeight> packed, at::Tensor bias,
               std::vector<at::Tensor> biases, bool rounds_inputs = false);

  // Gives the maps adapters, which outlive the object.
  void SetAdapter(LowRankAdapter adapter) { adapter_ = std::move(adapter); }
  // The adapters that a product on this thread adds; nullptr: none.
  const LowRankAdapter* adapter() const {
    return adapter_.a == nullptr || WithoutAdapters::is_active() ? nullptr : &adapter_;
  }

  // Returns the results of the maps side by side [T, sum of outs], for x [T, in] in the type of the
  // computation. Gradients of the masters have the masters' type.
  at::Tensor Forward(const at::Tensor& x) const;
  // Returns the same without adapters.
  at::Tensor Base(const at::Tensor& x) const;
  // Returns Base in float32, from float32 products of the values of x and of the matrix, where the
  // type of the computation is narrower. x is not rounded.
  at::Tensor BaseFloat32(const at::Tensor& x) const;
  // Returns the first `outs` columns of Base(x), without the work of the others, for the map of an
  // output layer; on a GPU without a bias in float32, as the products sum them up. No autograd.
  at::Tensor Logits(const at::Tensor& x, int64_t outs) const;
  // Returns residual + Forward(x). Like ops::LinearAdd it overwrites `residual` without autograd.
  at::Tensor ForwardAdd(const at::Tensor& residual, const at::Tensor& x) const;
  // Returns this rank's shard of the tokens (common/ops/shards/token_shards.h) of Forward(x), for a
  // map whose input the ranks of a group divide: x [T, in / n] and the weight are this rank's
  // columns. The bias is added once, to the sum.
  at::Tensor ForwardShard(const at::Tensor& x,
                          const std::shared_ptr<TensorParallelGroup>& group) const;
  // Like ForwardShard, where every rank keeps all tokens: the result is [T, out]. No autograd.
  at::Tensor ForwardSum(const at::Tensor& x,
                        const std::shared_ptr<TensorParallelGroup>& group) const;

  // Returns what the products multiply x by: x itself, or its rounded rows.
  at::Tensor Input(const at::Tensor& x) const;
  // Writes the tile's outputs of x weight^T, without adapters, to y [T, sum of outs], on the
  // calling thread alone, for the Input of contiguous rows; y is contiguous, in float32 on the CPU.
  // Needs the CPU's own kernels and maps without bias. No autograd.
  void MultiplyTile(const LinearTile& tile, const at::Tensor& input, const at::Tensor& y) const;

  // Must be called after the values of the masters have changed.
  void OnWeightsChanged();

  int64_t in() const { return packed_ != nullptr ? packed_->in() : compute_weight_.size(1); }
  int64_t out() const { return packed_ != nullptr ? packed_->out() : compute_weight_.size(0); }
  bool is_packed() const { return packed_ != nullptr; }
  // The packed maps; nullptr: they are dense.
  const std::shared_ptr<const PackedWeight>& packed() const { return packed_; }
  bool rounds_inputs() const { return rounds_inputs_; }
  // The parameters, one for each map; empty if the maps are packed.
  const std::vector<at::Tensor>& masters() const { return weights_; }
  // Returns the matrix that the products use: [sum of outs, in] in the type of the computation,
  // without autograd. Its storage stays the same for the life of the object. Throws c10::Error if
  // the maps are packed.
  const at::Tensor& compute_weight() const;
  // Returns the same or the packed matrix.
  MatrixRows rows() const {
    return packed_ != nullptr ? MatrixRows(packed_) : MatrixRows(compute_weight());
  }

 private:
  void RefreshCopy();
  void CheckFresh() const;
  // Multiplies by all maps, without autograd.
  at::Tensor Infer(const at::Tensor& x, const at::Tensor& bias) const;
  // Returns y, the product of the maps with x or a rank's part of it, and that of their adapters.
  // y is overwritten.
  at::Tensor Adapted(const at::Tensor& y, const at::Tensor& x) const;
  // Adds the bias of a single map.
  at::Tensor WithBias(const at::Tensor& sum) const;

  at::Tensor stacked_, bias_;
  std::vector<at::Tensor> weights_, biases_;
  std::shared_ptr<const PackedWeight> packed_;  // nullptr: the maps are dense
  // stacked_ and bias_ themselves if the type is the same.
  at::Tensor compute_weight_, compute_bias_;
  LowRankAdapter adapter_;
  bool has_copy_ = false;
  bool rounds_ = false;  // the copy of the matrix; there is no copy of the bias then
  bool rounds_inputs_ = false;
  int64_t copied_version_ = 0;  // autograd's count of changes to the stack
};

}  // namespace tandem::ops

#endif  // TANDEM_COMMON_OPS_LINEAR_LINEAR_WEIGHT_H_
