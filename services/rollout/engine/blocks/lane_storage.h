// The types in which a lane holds its model and computes. No torch.
#ifndef TANDEM_SERVICES_ROLLOUT_ENGINE_BLOCKS_LANE_STORAGE_H_
#define TANDEM_SERVICES_ROLLOUT_ENGINE_BLOCKS_LANE_STORAGE_H_

#include "common/base/files/paths/same_place.h"
#include "common/kernels/weight_format.h"
#include "common/model/config/compute_options.h"
#include "common/model/config/parameter_spec.h"
#include "common/model/config/quantization.h"
#include "common/tensor/dtype.h"
#include "services/rollout/engine/types.h"

namespace tandem::rollout {

struct LaneStorage {
  // The type of activations, norms and biases; and of linear maps in the format kDense.
  DType dtype;
  kernels::WeightFormat weight_format;
  DType cache_dtype;  // of keys and values
  // The type that linear maps round their inputs to (Placement::activation_dtype).
  DType activation_dtype = DType::kFloat32;
};

// Returns the type of the values that a lane keeps of a parameter, as far as a sender can round
// them: float32 where the lane quantises it.
inline DType StoredType(const ParameterSpec& spec, const LaneStorage& storage) {
  if (!IsPacked(spec, storage.weight_format)) {
    return spec.trains ? storage.dtype : DType::kFloat32;
  }
  return storage.weight_format == kernels::WeightFormat::kBfloat16 ? DType::kBFloat16
                                                                   : DType::kFloat32;
}

// Whether linear maps are packed: with the CPU's own kernels.
inline bool HasPackedLanes(const ComputeOptions& compute) {
  return compute.device == "cpu" && compute.kernels == "auto";
}

// The CPU's own kernels multiply packed maps with float32 activations; packed in float32 they give
// the bits of dense ones. Operations of ATen, which a GPU runs, compute in the lane's dtype. A
// quantised lane needs the own kernels.
inline LaneStorage StorageOf(const LaneOptions& lane, const EngineOptions& options) {
  using kernels::WeightFormat;
  if (!HasPackedLanes(options.compute)) {
    return {.dtype = lane.dtype,
            .weight_format = WeightFormat::kDense,
            .cache_dtype = options.kv_cache_dtype.value_or(lane.dtype)};
  }
  return {.dtype = DType::kFloat32,
          .weight_format = PackedFormat(lane.dtype, lane.quantization),
          .cache_dtype = options.kv_cache_dtype.value_or(DType::kFloat32),
          .activation_dtype = lane.activation_dtype};
}

// Whether the lanes compute with one copy of the weights: the junior is the model that the senior's
// adapters adapt, stored and divided in the same way.
inline bool SharesBaseModel(const EngineOptions& options) {
  const LaneOptions &senior = options.senior, &junior = options.junior;
  const RankLayout& layout = options.layout;
  return senior.lora != LoraOptions() && !junior.model.empty() &&
         SamePlace(senior.model, junior.model) && senior.dtype == junior.dtype &&
         senior.quantization == junior.quantization &&
         senior.activation_dtype == junior.activation_dtype && layout.junior_gpu_devices.empty() &&
         layout.tensor_parallel_size == layout.junior_tensor_parallel_size &&
         layout.enable_expert_parallel == layout.junior_enable_expert_parallel;
}

}  // namespace tandem::rollout

#endif  // TANDEM_SERVICES_ROLLOUT_ENGINE_BLOCKS_LANE_STORAGE_H_
