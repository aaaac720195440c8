#include "common/model/vision/vision_parameters.h"

#include <string>

#include "absl/strings/str_cat.h"

namespace tandem {
namespace {

void AddLinear(const std::string& name, int64_t out, int64_t in, ParameterList& list) {
  list.WholeTensor(name + ".weight", {out, in});
  list.WholeTensor(name + ".bias", {out}, Init::kZeros);
}

void AddNorm(const VisionConfig& vision, const std::string& name, ParameterList& list) {
  list.WholeTensor(name + ".weight", {vision.width}, Init::kOnes);
  if (!vision.rms_norm) list.WholeTensor(name + ".bias", {vision.width}, Init::kZeros);
}

void AddMlp(const VisionConfig& vision, const std::string& prefix, ParameterList& list) {
  const int64_t width = vision.width, inner = vision.intermediate_size;
  if (vision.gated_mlp) {
    AddLinear(prefix + "gate_proj", inner, width, list);
    AddLinear(prefix + "up_proj", inner, width, list);
    AddLinear(prefix + "down_proj", width, inner, list);
  } else {
    AddLinear(prefix + "fc1", inner, width, list);
    AddLinear(prefix + "fc2", width, inner, list);
  }
}

}  // namespace

void AddVisionTower(const VisionConfig& vision, int64_t hidden_size, ParameterList& list) {
  list.WholeTensor("visual.patch_embed.proj.weight",
                   {vision.width, vision.in_channels, vision.temporal_patch_size, vision.patch_size,
                    vision.patch_size});
  for (int64_t i = 0; i < vision.depth; ++i) {
    const std::string block = absl::StrCat("visual.blocks.", i, ".");
    AddNorm(vision, block + "norm1", list);
    AddNorm(vision, block + "norm2", list);
    AddLinear(block + "attn.qkv", 3 * vision.width, vision.width, list);
    AddLinear(block + "attn.proj", vision.width, vision.width, list);
    AddMlp(vision, block + "mlp.", list);
  }
  AddNorm(vision, "visual.merger.ln_q", list);
  AddLinear("visual.merger.mlp.0", vision.merged_width(), vision.merged_width(), list);
  AddLinear("visual.merger.mlp.2", hidden_size, vision.merged_width(), list);
}

}  // namespace tandem
