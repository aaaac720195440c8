// A feed-forward network of experts, of which each token takes a few
// (https://arxiv.org/abs/1701.06538): the weighted sum of gated MLPs, and of a shared one that
// every token takes.
//
// Tokens are grouped by expert, and an expert's maps multiply the rows of its tokens. There is no
// capacity and no padding: every choice is computed, and weights of experts that no token chose are
// not read.
//
// A shard has columns of every expert, and the whole router. Its experts' outputs are summands of
// the output, and are weighted before the ranks are summed, so that the network sends what a dense
// one does.
#ifndef TANDEM_COMMON_MODEL_FAMILIES_EXPERT_MLP_H_
#define TANDEM_COMMON_MODEL_FAMILIES_EXPERT_MLP_H_

#include <memory>
#include <string>
#include <vector>

#include "common/model/families/feed_forward.h"
#include "common/model/families/router.h"
#include "common/model/model_config.h"
#include "common/model/parameter_store.h"
#include "common/ops/linear_weight.h"
#include "common/ops/tensor_parallel_group.h"

namespace tandem {

class ExpertMlp : public FeedForward {
 public:
  // Takes the parameters of `layer` ("model.layers.<i>.") from `store`. `group` is nullptr for a
  // whole model.
  ExpertMlp(const DecoderOptions& options, const std::string& layer,
            std::shared_ptr<ops::TensorParallelGroup> group, ParameterStore& store);

  at::Tensor Forward(const at::Tensor& x, const at::Tensor& residual,
                     const ModelPass& pass) const override;

 private:
  // The maps of the expert that every token takes.
  struct SharedExpert {
    const ops::LinearWeight &gate_up, &down;
    const ops::LinearWeight* gate;  // of its output; nullptr: there is none
  };

  // Returns this rank's summand of the output.
  at::Tensor Output(const at::Tensor& x) const;

  const std::shared_ptr<ops::TensorParallelGroup> group_;
  const Router router_;
  std::vector<const ops::LinearWeight*> gate_up_, down_;  // one per expert
  std::unique_ptr<const SharedExpert> shared_;            // nullptr: there is none
};

}  // namespace tandem

#endif  // TANDEM_COMMON_MODEL_FAMILIES_EXPERT_MLP_H_
