// The vision tower of a model, read from the `vision_config` of config.json. No torch.
#ifndef TANDEM_COMMON_MODEL_VISION_VISION_CONFIG_H_
#define TANDEM_COMMON_MODEL_VISION_VISION_CONFIG_H_

#include <compare>
#include <cstdint>
#include <set>

namespace tandem {

// The patches of an image, or of the frames of a video, as the image processor of `transformers`
// numbers them. An image has one frame. Height and width are multiples of spatial_merge_size.
struct VisionGrid {
  int64_t frames = 1;
  int64_t height = 0;
  int64_t width = 0;

  int64_t patches() const { return frames * height * width; }
  auto operator<=>(const VisionGrid&) const = default;  // NOLINT(modernize-use-nullptr)
};

// Qwen2-VL (https://arxiv.org/abs/2409.12191) and Qwen2.5-VL (https://arxiv.org/abs/2502.13923).
struct VisionConfig {
  int64_t depth = 0;
  int64_t width = 0;  // of a patch's hidden state
  int64_t intermediate_size = 0;
  int64_t num_heads = 0;
  int64_t in_channels = 0;
  int64_t patch_size = 0;           // in pixels
  int64_t temporal_patch_size = 0;  // in frames
  int64_t spatial_merge_size = 0;   // this many patches squared become a row of the text model
  double rope_theta = 10000.0;
  // Qwen2.5-VL: RMSNorm and a gated MLP, instead of LayerNorm and an MLP with quick GELU.
  bool rms_norm = false;
  bool gated_mlp = false;
  // Qwen2.5-VL: layers attend within windows of so many pixels squared, but for those of
  // `full_attention_layers`. 0: all layers attend to the whole frame.
  int64_t window_size = 0;
  std::set<int64_t> full_attention_layers = {};
  // The distance of two frames that are a second apart, in positions of the text model. 0: frames
  // are at consecutive positions, however far apart they are.
  double tokens_per_second = 0.0;
  // The tokens that stand for a row of an image and of a video.
  int64_t image_token_id = 0;
  int64_t video_token_id = 0;

  int64_t head_dim() const { return width / num_heads; }
  int64_t merge_unit() const { return spatial_merge_size * spatial_merge_size; }
  // Number of values of a patch, and of the patches that become a row together.
  int64_t patch_values() const {
    return in_channels * temporal_patch_size * patch_size * patch_size;
  }
  int64_t merged_width() const { return width * merge_unit(); }
  // Number of rows of the text model that an image takes.
  int64_t Rows(const VisionGrid& grid) const { return grid.patches() / merge_unit(); }
  // Whether a token stands for a row of an image or of a video.
  bool IsImageToken(int64_t id) const { return id == image_token_id || id == video_token_id; }
};

}  // namespace tandem

#endif  // TANDEM_COMMON_MODEL_VISION_VISION_CONFIG_H_
