// A feed-forward network of experts, of which each token takes a few
// (https://arxiv.org/abs/1701.06538): the weighted sum of gated MLPs, and of a shared one that
// every token takes.
//
// Tokens are grouped by expert, and an expert's maps multiply the rows of its tokens. There is no
// capacity and no padding: every choice is computed, and weights of experts that no token chose are
// not read.
//
// A shard has the whole router, and columns of every expert or some experts (routed_experts.h). Its
// experts' outputs are summands of the output, and are weighted before the ranks are summed, so
// that the network sends what a dense one does.
#ifndef TANDEM_COMMON_MODEL_FAMILIES_BLOCKS_EXPERT_MLP_H_
#define TANDEM_COMMON_MODEL_FAMILIES_BLOCKS_EXPERT_MLP_H_

#include <cstdint>
#include <memory>
#include <string>

#include "common/model/config/model_config.h"
#include "common/model/families/blocks/feed_forward.h"
#include "common/model/families/blocks/gated_mlp.h"
#include "common/model/families/blocks/routed_experts.h"
#include "common/model/families/blocks/router.h"
#include "common/model/parameters/parameter.h"
#include "common/model/parameters/parameter_store.h"
#include "common/ops/linear/linear_weight.h"
#include "common/ops/shards/tensor_parallel_group.h"

namespace tandem {

class ExpertMlp : public FeedForward {
 public:
  // Takes the parameters of layer `index`, "<network>..." ("model.layers.<index>.mlp."), from
  // `store`.
  ExpertMlp(const DecoderOptions& options, int64_t index, const std::string& network,
            const Placement& placement, ParameterStore& store);

  at::Tensor Forward(const at::Tensor& x, const at::Tensor& residual,
                     const ModelPass& pass) const override;

 private:
  // Returns this rank's summand of the output.
  at::Tensor Output(const at::Tensor& x, const ModelPass& pass) const;

  const std::shared_ptr<ops::TensorParallelGroup> group_;  // nullptr: the model is whole
  const Router router_;
  const RoutedExperts experts_;
  // This rank's columns of the expert that every token takes, and the gate of its output. nullptr:
  // there is none.
  std::unique_ptr<const GatedMlp> shared_;
  const ops::LinearWeight* shared_gate_ = nullptr;
};

}  // namespace tandem

#endif  // TANDEM_COMMON_MODEL_FAMILIES_BLOCKS_EXPERT_MLP_H_
