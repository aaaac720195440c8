// Losses of the routers of a mixture of experts, and the loads of its experts.
//
// For a layer with E experts, of which a token takes k, and router logits x [T, E]:
//
//   load balancing   sum over tokens t of  E sum_e f_{s(t), e} p_{t, e}
//   z                sum over tokens t of  (log sum_e exp x_{t, e})^2
//
// f_{s, e} is the fraction of the tokens of sequence s that take expert e, and has no gradient;
// p_t are the scores of token t, divided by their sum. A token adds k to the first loss where all
// experts of its sequence are taken equally often. For a batch of one sequence and a model of one
// layer with experts, its mean over the tokens is the aux_loss of `transformers`.
//
// Load balancing: https://arxiv.org/abs/2101.03961 (equations 4 to 6), for each sequence by itself
// as in https://arxiv.org/abs/2412.19437 (equations 17 to 20). A token of a prefix that sequences
// share counts in each of them. z: https://arxiv.org/abs/2202.08906
// (equation 5).
#ifndef TANDEM_COMMON_MODEL_PASSES_ROUTER_LOSSES_H_
#define TANDEM_COMMON_MODEL_PASSES_ROUTER_LOSSES_H_

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "common/model/config/model_config.h"
#include "common/model/passes/backbone.h"

namespace tandem {

// The losses and loads of one pass over a batch, which the routers record (BatchRouting::losses).
class RouterLosses {
 public:
  // Factors of the two sums above in the loss of the update; 0: the loss has no gradient.
  struct Scales {
    double load_balancing = 0;
    double z = 0;
  };

  // The model is on `device`.
  RouterLosses(const ExpertOptions& experts, int64_t num_hidden_layers, const Scales& scales,
               at::Device device);

  // Records the layer `place`, counted among the layers with experts. Returns `weights`, a function
  // of `logits`, whose backward pass adds the gradients of the losses. logits [T, E] float32;
  // experts [T, k], those that the tokens take. A layer that runs again, because its activations
  // are recomputed, records the same numbers in the place of the former ones. Collective over the
  // ranks that hold the sequences' other tokens (AttentionContext::SumOverRanks).
  at::Tensor Record(int64_t place, const at::Tensor& weights, const at::Tensor& logits,
                    const at::Tensor& experts, const ModelPass& pass);

  // [layers with experts, E + 2] float64: how often each expert was taken, then the
  // sums of load balancing and z over the tokens that are here. 0 for layers that did not run here.
  const at::Tensor& sums() const { return sums_; }

 private:
  const RoutingRule rule_;
  const Scales scales_;
  const at::Tensor sums_;
};

}  // namespace tandem

#endif  // TANDEM_COMMON_MODEL_PASSES_ROUTER_LOSSES_H_
