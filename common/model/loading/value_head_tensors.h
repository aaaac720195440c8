// Finds the value head in checkpoints of other tools.
#ifndef TANDEM_COMMON_MODEL_LOADING_VALUE_HEAD_TENSORS_H_
#define TANDEM_COMMON_MODEL_LOADING_VALUE_HEAD_TENSORS_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/tensor/safetensors/safetensors.h"

namespace tandem {

struct ValueHeadTensors {
  const TensorView* weight = nullptr;  // nullptr: the checkpoint holds no value head
  const TensorView* bias = nullptr;
};

// Whether the name is one of: score.{weight,bias} (transformers), v_head.summary.* (Hugging Face
// TRL), output_layer.value_head.* and output_layer.* (Megatron).
bool IsValueHeadName(absl::string_view name);

// Finds the value head among `tensors`. INVALID_ARGUMENT for two heads, or a bias without its
// weight; UNIMPLEMENTED for a head of several layers.
absl::StatusOr<ValueHeadTensors> FindValueHead(const std::vector<const TensorView*>& tensors);

}  // namespace tandem

#endif  // TANDEM_COMMON_MODEL_LOADING_VALUE_HEAD_TENSORS_H_
