#include "common/model/vision/vision_tower.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "common/model/config/model_config.h"
#include "common/model/passes/rope.h"
#include "common/model/vision/vision_layout.h"
#include "common/model/vision/vision_ops.h"
#include "common/ops/ops.h"
#include "common/tensor/aten/device_copies.h"

namespace tandem {
namespace {

constexpr double kNormEps = 1e-6;  // whatever rms_norm_eps says

std::vector<float> Frequencies(const VisionConfig& vision) {
  return ComputeRopeFrequencies({.theta = vision.rope_theta}, vision.head_dim() / 2).inverse;
}

int64_t End(const std::vector<int64_t>& positions) {
  return positions.empty() ? 0 : *std::max_element(positions.begin(), positions.end()) + 1;
}

// Puts the groups [groups, group, ...] of the rows of `x` in another order.
at::Tensor ReorderGroups(const at::Tensor& x, const at::Tensor& order, int64_t group) {
  return x.unflatten(0, {order.numel(), group}).index_select(0, order).flatten(0, 1);
}

}  // namespace

VisionTower::VisionTower(const VisionConfig& vision, at::ScalarType dtype, at::Device device,
                         ParameterStore& store)
    : vision_(vision),
      dtype_(dtype),
      device_(device),
      patch_embedding_(store.Take("visual.patch_embed.proj.weight")),
      merger_norm_(TakeNorm("visual.merger.ln_q", store)),
      merger_in_(&store.TakeLinear({"visual.merger.mlp.0"})),
      merger_out_(&store.TakeLinear({"visual.merger.mlp.2"})),
      rotary_(Frequencies(vision), /*scaling=*/1.0, /*longest_sequence=*/512, device) {
  for (int64_t i = 0; i < vision.depth; ++i) {
    const std::string block = absl::StrCat("visual.blocks.", i, ".");
    const std::string mlp = block + "mlp.";
    layers_.push_back(
        {.norm1 = TakeNorm(block + "norm1", store),
         .norm2 = TakeNorm(block + "norm2", store),
         .qkv = &store.TakeLinear({block + "attn.qkv"}),
         .proj = &store.TakeLinear({block + "attn.proj"}),
         .up = vision.gated_mlp ? &store.TakeLinear({mlp + "gate_proj", mlp + "up_proj"})
                                : &store.TakeLinear({mlp + "fc1"}),
         .down = &store.TakeLinear({mlp + (vision.gated_mlp ? "down_proj" : "fc2")})});
  }
}

VisionTower::Norm VisionTower::TakeNorm(const std::string& name, ParameterStore& store) const {
  return {.weight = store.Take(name + ".weight"), .bias = store.Take(name + ".bias")};
}

at::Tensor VisionTower::Normalised(const at::Tensor& x, const Norm& norm) const {
  return vision_.rms_norm ? ops::RmsNorm(x, norm.weight, kNormEps)
                          : LayerNorm(x, norm.weight, norm.bias, kNormEps);
}

at::Tensor VisionTower::RunLayer(const Layer& layer, const at::Tensor& input,
                                 const Rotation& rotation,
                                 const std::vector<int64_t>& segments) const {
  const std::vector<at::Tensor> qkv = layer.qkv->Forward(Normalised(input, layer.norm1))
                                          .unflatten(1, {3, vision_.num_heads, vision_.head_dim()})
                                          .unbind(1);
  const at::Tensor q = ops::RotaryEmbedding(qkv[0], rotation.cos, rotation.sin),
                   k = ops::RotaryEmbedding(qkv[1], rotation.cos, rotation.sin);
  const at::Tensor x = layer.proj->ForwardAdd(input, SegmentAttention(q, k, qkv[2], segments));
  const at::Tensor up = layer.up->Forward(Normalised(x, layer.norm2));
  return layer.down->ForwardAdd(x, vision_.gated_mlp ? ops::SwiGlu(up) : QuickGelu(up));
}

at::Tensor VisionTower::Forward(const at::Tensor& pixel_values,
                                const std::vector<VisionGrid>& grids) const {
  const int64_t patches =
      std::accumulate(grids.begin(), grids.end(), int64_t{0},
                      [](int64_t sum, const VisionGrid& grid) { return sum + grid.patches(); });
  TORCH_CHECK(pixel_values.dim() == 2 && pixel_values.size(0) == patches &&
                  pixel_values.size(1) == vision_.patch_values(),
              "pixel values ", pixel_values.sizes(), " for ", patches, " patches of ",
              vision_.patch_values(), " values");
  const VisionLayout layout = LayOut(vision_, grids);
  at::Tensor x = ops::Linear(pixel_values.to(dtype_), patch_embedding_.flatten(1).to(dtype_));
  at::Tensor order;
  if (!layout.group_order.empty()) {
    order = CopyToDevice(layout.group_order, device_);
    x = ReorderGroups(x, order, vision_.merge_unit());
  }
  const auto by_row = rotary_.Rows(CopyToDevice(layout.row, device_), End(layout.row)),
             by_column = rotary_.Rows(CopyToDevice(layout.column, device_), End(layout.column));
  const Rotation rotation = {.cos = at::cat({by_row.first, by_column.first}, 1),
                             .sin = at::cat({by_row.second, by_column.second}, 1)};
  for (size_t i = 0; i < layers_.size(); ++i) {
    const bool is_full = vision_.full_attention_layers.contains(static_cast<int64_t>(i));
    x = RunLayer(layers_[i], x, rotation, is_full ? layout.frames : layout.windows);
  }
  x = Normalised(x, merger_norm_).reshape({-1, vision_.merged_width()});
  x = merger_out_->Forward(Gelu(merger_in_->Forward(x)));
  return order.defined() ? x.index_select(0, order.argsort()) : x;
}

}  // namespace tandem
