// The vision towers of Qwen2-VL (https://arxiv.org/abs/2409.12191) and Qwen2.5-VL
// (https://arxiv.org/abs/2502.13923): patches, layers of attention with a rotation by row and
// column, and a merger that makes one row for the text model out of each square of patches.
#ifndef TANDEM_COMMON_MODEL_VISION_VISION_TOWER_H_
#define TANDEM_COMMON_MODEL_VISION_VISION_TOWER_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "common/model/parameters/parameter_store.h"
#include "common/model/vision/vision_config.h"
#include "common/ops/linear/linear_weight.h"
#include "common/ops/rotary/rotary_table.h"

namespace tandem {

class VisionTower {
 public:
  // Takes the parameters of AddVisionTower (vision_parameters.h) from `store`, which must outlive
  // the tower. `dtype` is the type of the computation.
  VisionTower(const VisionConfig& vision, at::ScalarType dtype, at::Device device,
              ParameterStore& store);

  // pixel_values [P, patch_values] of the images of `grids`, one after the other -> [rows, H] in
  // the type of the computation: VisionConfig::Rows for each image. Differentiable. Throws
  // c10::Error for another number of patches or values.
  at::Tensor Forward(const at::Tensor& pixel_values, const std::vector<VisionGrid>& grids) const;

 private:
  struct Norm {
    at::Tensor weight, bias;  // of RMSNorm no bias
  };
  struct Layer {
    Norm norm1, norm2;
    const ops::LinearWeight *qkv, *proj, *up, *down;  // a gated MLP has its gates in `up`
  };
  struct Rotation {
    at::Tensor cos, sin;  // [P, head_dim / 2]
  };

  Norm TakeNorm(const std::string& name, ParameterStore& store) const;
  at::Tensor Normalised(const at::Tensor& x, const Norm& norm) const;
  at::Tensor RunLayer(const Layer& layer, const at::Tensor& x, const Rotation& rotation,
                      const std::vector<int64_t>& segments) const;

  const VisionConfig vision_;
  const at::ScalarType dtype_;
  const at::Device device_;
  at::Tensor patch_embedding_;  // [width, channels, frames, height, width]
  std::vector<Layer> layers_;
  Norm merger_norm_;
  const ops::LinearWeight *merger_in_, *merger_out_;
  mutable ops::RotaryTable rotary_;  // head_dim / 4 frequencies, for rows and for columns
};

}  // namespace tandem

#endif  // TANDEM_COMMON_MODEL_VISION_VISION_TOWER_H_
