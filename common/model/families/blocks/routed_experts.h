// The experts of a layer that this process holds, and their weighted sums for tokens.
//
// A process may hold
//   all experts, or a tensor-parallel shard of each: it computes its own tokens;
//   whole experts of a layer that tensor-parallel ranks divide (ExpertShard::whole): every rank has
//     all tokens, computes those rows that chose its experts, and the caller adds up the ranks;
//   a range of them (Placement::expert_group): rows travel to the ranks that hold their experts and
//     outputs travel back, so that a token adds them up where it is
//     (common/ops/experts/expert_exchange.h).
// In the first and the last a token has the same bits, wherever its experts are.
#ifndef TANDEM_COMMON_MODEL_FAMILIES_BLOCKS_ROUTED_EXPERTS_H_
#define TANDEM_COMMON_MODEL_FAMILIES_BLOCKS_ROUTED_EXPERTS_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "common/model/config/model_config.h"
#include "common/model/families/blocks/router.h"
#include "common/model/parameters/parameter.h"
#include "common/model/parameters/parameter_store.h"
#include "common/ops/experts/expert_parallel_group.h"
#include "common/ops/linear/linear_weight.h"

namespace tandem {

class RoutedExperts {
 public:
  // Takes the held experts below `network` ("model.layers.<i>.mlp.") from `store`.
  RoutedExperts(const DecoderOptions& options, const std::string& network,
                const Placement& placement, ParameterStore& store);

  // Returns for each row of x [T, H] the sum of the outputs of its experts, weighted by the routing
  // of T tokens; with whole experts of tensor-parallel ranks, or shards of each, this rank's
  // summand of it.
  at::Tensor Forward(const at::Tensor& x, const Routing& routing) const;

 private:
  // Returns the outputs of the held experts for rows sorted by expert, from `offsets` on, which are
  // those of ops::GroupedLinear on the host or on a device.
  template <typename Offsets>
  at::Tensor Outputs(const at::Tensor& rows, const Offsets& offsets) const;

  const int64_t num_experts_;  // of the layer
  const ExpertShard held_;
  const std::shared_ptr<ops::ExpertParallelGroup> group_;  // nullptr: rows do not travel
  bool train_ = false;                                     // whether any expert of the layer does
  std::vector<const ops::LinearWeight*> gate_up_, down_;   // one per held expert
  bool are_stacked_ = false;  // whether one operation finds all of them, and no row travels
};

}  // namespace tandem

#endif  // TANDEM_COMMON_MODEL_FAMILIES_BLOCKS_ROUTED_EXPERTS_H_
