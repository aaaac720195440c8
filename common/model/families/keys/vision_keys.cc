// Families with a vision tower, and the objects of rotations.
#include "common/model/families/keys/common_keys.h"
#include "common/model/families/keys/family_keys.h"

namespace tandem {
namespace {

// What both towers share.
ConfigKeys TowerKeys() {
  return Join(
      {EveryClassKeys(),
       {
           Obeyed("depth", "32"), OtherName("num_hidden_layers", "depth"),
           Obeyed("num_heads", "16"), OtherName("num_attention_heads", "num_heads"),
           Obeyed("in_channels", "3"), Obeyed("patch_size", "14"),
           Obeyed("temporal_patch_size", "2"), Obeyed("spatial_merge_size", "2"),
           OrNull("rope_parameters"), OrNull("rope_scaling"), Obeyed("rope_theta", "10000.0"),
           Only("head_dim", "null", "a separate head width"),
           NoEffect("partial_rotary_factor"),  // the tower rotates whole heads
           NoEffect("initializer_range"),      // a tower is loaded, never new
       }});
}

}  // namespace

ConfigKeys QwenVlTextKeys() {
  return Join({TextKeys("1000000.0"),
               {
                   Obeyed("vocab_size", "152064"),
                   Obeyed("hidden_size", "8192"),
                   Obeyed("intermediate_size", "29568"),
                   Obeyed("num_hidden_layers", "80"),
                   Obeyed("num_attention_heads", "64"),
                   OrNull("num_key_value_heads", "8"),
                   OrNull("head_dim"),
                   Only("hidden_act", R"("silu")", kActivation),
                   Obeyed("max_position_embeddings", "32768"),
                   OrNull("original_max_position_embeddings"),
                   Obeyed("rms_norm_eps", "1e-05"),
                   OrNull("eos_token_id", "151645"),
                   Obeyed("tie_word_embeddings", "false"),
                   Only("use_sliding_window", "false", "sliding-window attention"),
                   OrNull("layer_types"),
                   NoEffect("sliding_window"),
                   NoEffect("max_window_layers"),
                   Only("use_bidirectional_attention", "false", "bidirectional attention"),
               }});
}

ConfigKeys QwenVlKeys() {
  return Join({EveryClassKeys(),
               {
                   OrNull("text_config"),
                   Obeyed("vision_config", "{}"),
                   Obeyed("image_token_id", "151655"),
                   Obeyed("video_token_id", "151656"),
                   Obeyed("tie_word_embeddings", "false"),
                   // The tokens around images, which the processor writes.
                   NoEffect("vision_start_token_id"),
                   NoEffect("vision_end_token_id"),
                   // Beside a `text_config`, which has those of the model. Older files have no such
                   // object, and the text model's keys here.
                   NoEffect("rope_scaling"),
                   NoEffect("rope_theta"),
               }});
}

ConfigKeys Qwen2VlVisionKeys() {
  return Join({TowerKeys(),
               {
                   Obeyed("embed_dim", "1280"),
                   Obeyed("hidden_size", "3584"),
                   Obeyed("mlp_ratio", "4"),
                   Only("hidden_act", R"("quick_gelu")", kActivation),
               }});
}

ConfigKeys Qwen25VlVisionKeys() {
  return Join({TowerKeys(),
               {
                   Obeyed("hidden_size", "3584"),
                   Obeyed("intermediate_size", "3420"),
                   Obeyed("out_hidden_size", "3584"),
                   Obeyed("tokens_per_second", "4"),
                   Obeyed("window_size", "112"),
                   Obeyed("fullatt_block_indexes", "[7, 15, 23, 31]"),
                   Only("hidden_act", R"("silu")", kActivation),
               }});
}

ConfigKeys RopeKeys() {
  return {
      OrNull("rope_theta"),
      OrNull("rope_type"),
      OrNull("type"),  // the older name; rope_type comes before it
      OrNull("partial_rotary_factor"),
      OrNull("factor"),
      OrNull("original_max_position_embeddings"),
      OrNull("attention_factor"),
      OrNull("beta_fast"),
      OrNull("beta_slow"),
      OrNull("truncate", "true"),
      OrNull("mscale"),
      OrNull("mscale_all_dim"),
      OrNull("short_factor"),
      OrNull("long_factor"),
      OrNull("low_freq_factor"),
      OrNull("high_freq_factor"),
      OrNull("mrope_section"),
      OrNull("full_attention"),
      OrNull("sliding_attention"),
  };
}

ConfigKeys VisionRopeKeys() {
  return {
      OrNull("rope_theta"),
      OrNull("rope_type"),
      OrNull("type"),
      NoEffect("partial_rotary_factor"),
  };
}

}  // namespace tandem
