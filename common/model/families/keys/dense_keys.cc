// Families without experts.
#include "common/model/families/keys/common_keys.h"
#include "common/model/families/keys/family_keys.h"

namespace tandem {
namespace {

// What Gemma 2 and Gemma 3 share.
ConfigKeys GemmaKeys(const char* rope_theta) {
  return Join({TextKeys(rope_theta),
               {
                   Obeyed("hidden_size", "2304"),
                   Obeyed("intermediate_size", "9216"),
                   Obeyed("num_hidden_layers", "26"),
                   Obeyed("num_attention_heads", "8"),
                   Obeyed("num_key_value_heads", "4"),
                   Obeyed("head_dim", "256"),
                   Only("hidden_activation", R"("gelu_pytorch_tanh")", kActivation),
                   Obeyed("rms_norm_eps", "1e-06"),
                   OrNull("eos_token_id", "1"),
                   Obeyed("tie_word_embeddings", "true"),
                   Obeyed("attention_bias", "false"),
                   Obeyed("query_pre_attn_scalar", "256"),
                   Obeyed("sliding_window", "4096"),
                   OrNull("layer_types"),
                   Only("use_bidirectional_attention", "false", "bidirectional attention"),
               }});
}

}  // namespace

ConfigKeys LlamaKeys() {
  return Join({TextKeys("10000.0"),
               SameLayerKeys(),
               {
                   Obeyed("vocab_size", "32000"),
                   Obeyed("hidden_size", "4096"),
                   Obeyed("intermediate_size", "11008"),
                   Obeyed("num_hidden_layers", "32"),
                   Obeyed("num_attention_heads", "32"),
                   OrNull("num_key_value_heads"),
                   OrNull("head_dim"),
                   Only("hidden_act", R"("silu")", kActivation),
                   Obeyed("max_position_embeddings", "2048"),
                   OrNull("original_max_position_embeddings"),
                   Obeyed("rms_norm_eps", "1e-06"),
                   OrNull("eos_token_id", "2"),
                   Obeyed("tie_word_embeddings", "false"),
                   Obeyed("attention_bias", "false"),
                   Obeyed("mlp_bias", "false"),
                   Only("use_sliding_window", "false", "sliding-window attention"),
                   NoEffect("pretraining_tp"),
               }});
}

ConfigKeys MistralKeys() {
  return Join({TextKeys("10000.0"),
               {
                   Obeyed("vocab_size", "32000"),
                   Obeyed("hidden_size", "4096"),
                   Obeyed("intermediate_size", "14336"),
                   Obeyed("num_hidden_layers", "32"),
                   Obeyed("num_attention_heads", "32"),
                   Obeyed("num_key_value_heads", "8"),
                   OrNull("head_dim"),
                   Only("hidden_act", R"("silu")", kActivation),
                   Obeyed("max_position_embeddings", "131072"),
                   OrNull("original_max_position_embeddings"),
                   Obeyed("rms_norm_eps", "1e-06"),
                   OrNull("eos_token_id", "2"),
                   Obeyed("tie_word_embeddings", "false"),
                   OrNull("sliding_window", "4096"),
                   OrNull("layer_types"),
                   Only("use_bidirectional_attention", "false", "bidirectional attention"),
               }});
}

ConfigKeys Qwen2Keys() {
  return Join({TextKeys("10000.0"),
               QwenWindowKeys("28"),
               {
                   Obeyed("vocab_size", "151936"),
                   Obeyed("hidden_size", "4096"),
                   Obeyed("intermediate_size", "22016"),
                   Obeyed("num_hidden_layers", "32"),
                   Obeyed("num_attention_heads", "32"),
                   OrNull("num_key_value_heads", "32"),
                   OrNull("head_dim"),
                   Only("hidden_act", R"("silu")", kActivation),
                   Obeyed("max_position_embeddings", "32768"),
                   OrNull("original_max_position_embeddings"),
                   Obeyed("rms_norm_eps", "1e-06"),
                   OrNull("eos_token_id"),
                   Obeyed("tie_word_embeddings", "false"),
                   Only("use_bidirectional_attention", "false", "bidirectional attention"),
               }});
}

ConfigKeys Qwen3Keys() {
  return Join({TextKeys("10000.0"),
               QwenWindowKeys("28"),
               {
                   Obeyed("vocab_size", "151936"),
                   Obeyed("hidden_size", "4096"),
                   Obeyed("intermediate_size", "22016"),
                   Obeyed("num_hidden_layers", "32"),
                   Obeyed("num_attention_heads", "32"),
                   OrNull("num_key_value_heads", "32"),
                   Obeyed("head_dim", "128"),
                   Only("hidden_act", R"("silu")", kActivation),
                   Obeyed("max_position_embeddings", "32768"),
                   OrNull("original_max_position_embeddings"),
                   Obeyed("rms_norm_eps", "1e-06"),
                   OrNull("eos_token_id"),
                   Obeyed("tie_word_embeddings", "false"),
                   Obeyed("attention_bias", "false"),
                   Only("use_bidirectional_attention", "false", "bidirectional attention"),
               }});
}

ConfigKeys Olmo2Keys() {
  return Join({TextKeys("10000.0"),
               SameLayerKeys(),
               {
                   Obeyed("vocab_size", "50304"),
                   Obeyed("hidden_size", "4096"),
                   Obeyed("intermediate_size", "11008"),
                   Obeyed("num_hidden_layers", "32"),
                   Obeyed("num_attention_heads", "32"),
                   OrNull("num_key_value_heads"),
                   OrNull("head_dim"),
                   Only("hidden_act", R"("silu")", kActivation),
                   Obeyed("max_position_embeddings", "2048"),
                   OrNull("original_max_position_embeddings"),
                   Obeyed("rms_norm_eps", "1e-05"),
                   OrNull("eos_token_id", "50279"),
                   Obeyed("tie_word_embeddings", "false"),
                   Obeyed("attention_bias", "false"),
                   Only("use_sliding_window", "false", "sliding-window attention"),
               }});
}

ConfigKeys Gemma2Keys() {
  return Join({GemmaKeys("10000.0"),
               {
                   Obeyed("vocab_size", "256000"),
                   Obeyed("max_position_embeddings", "8192"),
                   OrNull("original_max_position_embeddings"),
                   OrNull("final_logit_softcapping", "30.0"),
                   OrNull("attn_logit_softcapping", "50.0"),
               }});
}

ConfigKeys Gemma3Keys() {
  return Join({GemmaKeys("1000000.0"),  // of layers without a window
               {
                   Obeyed("vocab_size", "262208"),
                   Obeyed("max_position_embeddings", "131072"),
                   Obeyed("rope_local_base_freq", "10000.0"),  // of layers with a window
                   Obeyed("sliding_window_pattern", "6"),      // where there is no layer_types
                   OrNull("final_logit_softcapping"),
                   // The class reads it, and its attention has no such cap.
                   NoEffect("attn_logit_softcapping"),
               }});
}

ConfigKeys Phi3Keys() {
  return Join({TextKeys("10000.0"),
               SameLayerKeys(),
               {
                   Obeyed("vocab_size", "32064"),
                   Obeyed("hidden_size", "3072"),
                   Obeyed("intermediate_size", "8192"),
                   Obeyed("num_hidden_layers", "32"),
                   Obeyed("num_attention_heads", "32"),
                   OrNull("num_key_value_heads"),
                   OrNull("head_dim"),
                   Only("hidden_act", R"("silu")", kActivation),
                   Obeyed("max_position_embeddings", "4096"),
                   Obeyed("original_max_position_embeddings", "4096"),
                   Obeyed("rms_norm_eps", "1e-05"),
                   OrNull("eos_token_id", "32000"),
                   Obeyed("tie_word_embeddings", "false"),
                   OrNull("sliding_window"),
                   NoEffect("embd_pdrop"),
                   NoEffect("resid_pdrop"),
               }});
}

}  // namespace tandem
