// Where the checkpoints of other tools keep a value head.
#ifndef TANDEM_COMMON_MODEL_VALUE_HEAD_TENSORS_H_
#define TANDEM_COMMON_MODEL_VALUE_HEAD_TENSORS_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/tensor/safetensors.h"

namespace tandem {

struct ValueHeadTensors {
  const TensorView* weight = nullptr;  // nullptr: the checkpoint holds no value head
  const TensorView* bias = nullptr;
};

// score.{weight,bias} (transformers), v_head.summary.* (Hugging Face TRL),
// output_layer.value_head.* and output_layer.* (Megatron).
bool IsValueHeadName(absl::string_view name);

// INVALID_ARGUMENT when there are two heads, or a bias without its weight.
absl::StatusOr<ValueHeadTensors> FindValueHead(const std::vector<const TensorView*>& tensors);

}  // namespace tandem

#endif  // TANDEM_COMMON_MODEL_VALUE_HEAD_TENSORS_H_
