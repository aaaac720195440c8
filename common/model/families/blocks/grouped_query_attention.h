// Rotary grouped-query attention (https://arxiv.org/abs/2305.13245), with norms of queries and keys
// where the family has them (QkNorm).
#ifndef TANDEM_COMMON_MODEL_FAMILIES_BLOCKS_GROUPED_QUERY_ATTENTION_H_
#define TANDEM_COMMON_MODEL_FAMILIES_BLOCKS_GROUPED_QUERY_ATTENTION_H_

#include <cstdint>
#include <memory>
#include <string>

#include "common/model/config/model_config.h"
#include "common/model/families/blocks/self_attention.h"
#include "common/model/parameters/parameter_store.h"
#include "common/model/passes/attention_context.h"
#include "common/ops/linear/linear_weight.h"
#include "common/ops/shards/tensor_parallel_group.h"

namespace tandem {

class GroupedQueryAttention : public SelfAttention {
 public:
  // Takes "<prefix>q_proj", "k_proj", "v_proj" and the norms from `store`. `config` must outlive
  // it. `group` is nullptr for a whole model.
  GroupedQueryAttention(const ModelConfig& config, int64_t layer, const std::string& prefix,
                        std::shared_ptr<ops::TensorParallelGroup> group, ParameterStore& store);

  at::Tensor Attend(const at::Tensor& x, const ModelPass& pass) const override;

 private:
  // Divides [T, heads * D] into [T, heads, D].
  at::Tensor Heads(const at::Tensor& x) const;
  struct QueriesAndKeys {
    at::Tensor q, k;  // [T, heads, D]
  };
  // Normalises q and k [T, heads * D] as QkNorm says, and divides them into heads.
  QueriesAndKeys NormHeads(const at::Tensor& q, const at::Tensor& k) const;

  const ModelConfig& config_;
  const AttentionLayer layer_;
  const std::shared_ptr<ops::TensorParallelGroup> group_;
  const ops::LinearWeight& qkv_;
  const at::Tensor q_norm_, k_norm_;  // undefined, [head_dim], or [own heads * head_dim]
};

}  // namespace tandem

#endif  // TANDEM_COMMON_MODEL_FAMILIES_BLOCKS_GROUPED_QUERY_ATTENTION_H_
