// Families with experts.
#include "common/model/families/expert_options.h"
#include "common/model/families/keys/common_keys.h"
#include "common/model/families/keys/family_keys.h"

namespace tandem {

ConfigKeys DeepseekV3Keys() {
  return Join({TextKeys("10000.0"),
               SameLayerKeys(),
               RouterKeys(),
               {
                   Obeyed("vocab_size", "129280"),
                   Obeyed("hidden_size", "7168"),
                   Obeyed("intermediate_size", "18432"),
                   Obeyed("num_hidden_layers", "61"),
                   Obeyed("num_attention_heads", "128"),
                   OrNull("num_key_value_heads", "128"),
                   OrNull("head_dim"),  // must be qk_rope_head_dim
                   OrNull("q_lora_rank", "1536"),
                   Obeyed("kv_lora_rank", "512"),
                   Obeyed("qk_nope_head_dim", "128"),
                   Obeyed("qk_rope_head_dim", "64"),
                   Obeyed("v_head_dim", "128"),
                   OrNull("rope_interleave", "true"),
                   Only("hidden_act", R"("silu")", kActivation),
                   Obeyed("max_position_embeddings", "4096"),
                   OrNull("original_max_position_embeddings"),
                   Obeyed("rms_norm_eps", "1e-06"),
                   OrNull("eos_token_id", "1"),
                   Obeyed("tie_word_embeddings", "false"),
                   Obeyed("attention_bias", "false"),
                   Obeyed("n_routed_experts", "256"),
                   OtherName("num_local_experts", "n_routed_experts"),
                   Obeyed("num_experts_per_tok", "8"),
                   Obeyed(kNumSharedExperts, "1"),
                   Obeyed("moe_intermediate_size", "2048"),
                   Obeyed("first_k_dense_replace", "3"),
                   OrNull("norm_topk_prob", "true"),
                   Obeyed("routed_scaling_factor", "2.5"),
                   Obeyed("n_group", "8"),
                   Obeyed("topk_group", "4"),
                   Obeyed("num_nextn_predict_layers", "1"),
                   OtherName("num_mtp_layers", "num_nextn_predict_layers"),
                   // The class computes these alone, and has no keys for others.
                   Only("scoring_func", R"("sigmoid")", "another score of the experts"),
                   Only("topk_method", R"("noaux_tc")", "another choice of experts"),
                   Only("moe_layer_freq", "1", "experts in some of the layers"),
                   Only("use_sliding_window", "false", "sliding-window attention"),
                   NoEffect("pretraining_tp"),
               }});
}

ConfigKeys MixtralKeys() {
  return Join({TextKeys("1000000.0"),
               SameLayerKeys(),
               RouterKeys(),
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
                   Obeyed("rms_norm_eps", "1e-05"),
                   OrNull("eos_token_id", "2"),
                   Obeyed("tie_word_embeddings", "false"),
                   OrNull("sliding_window"),
                   Obeyed("num_local_experts", "8"),
                   OtherName("num_experts", "num_local_experts"),
                   Obeyed("num_experts_per_tok", "2"),
                   Only("router_jitter_noise", "0.0", "noise on the router's input"),
               }});
}

ConfigKeys Qwen2MoeKeys() {
  return Join({TextKeys("10000.0"),
               QwenWindowKeys("28"),
               RouterKeys(),
               {
                   Obeyed("vocab_size", "151936"),
                   Obeyed("hidden_size", "2048"),
                   Obeyed("intermediate_size", "5632"),
                   Obeyed("num_hidden_layers", "24"),
                   Obeyed("num_attention_heads", "16"),
                   OrNull("num_key_value_heads", "16"),
                   OrNull("head_dim"),
                   Only("hidden_act", R"("silu")", kActivation),
                   Obeyed("max_position_embeddings", "32768"),
                   OrNull("original_max_position_embeddings"),
                   Obeyed("rms_norm_eps", "1e-06"),
                   OrNull("eos_token_id"),
                   Obeyed("tie_word_embeddings", "false"),
                   Obeyed("qkv_bias", "true"),
                   Obeyed("num_experts", "60"),
                   Obeyed("num_experts_per_tok", "4"),
                   Obeyed("moe_intermediate_size", "1408"),
                   Obeyed("shared_expert_intermediate_size", "5632"),
                   Obeyed("decoder_sparse_step", "1"),
                   OrNull("mlp_only_layers"),
                   Obeyed("norm_topk_prob", "false"),
                   Only("use_bidirectional_attention", "false", "bidirectional attention"),
               }});
}

ConfigKeys Qwen3MoeKeys() {
  return Join({TextKeys("10000.0"),
               SameLayerKeys(),
               RouterKeys(),
               {
                   Obeyed("vocab_size", "151936"),
                   Obeyed("hidden_size", "2048"),
                   Obeyed("intermediate_size", "6144"),
                   Obeyed("num_hidden_layers", "24"),
                   Obeyed("num_attention_heads", "32"),
                   Obeyed("num_key_value_heads", "4"),
                   OrNull("head_dim"),
                   Only("hidden_act", R"("silu")", kActivation),
                   Obeyed("max_position_embeddings", "32768"),
                   OrNull("original_max_position_embeddings"),
                   Obeyed("rms_norm_eps", "1e-06"),
                   OrNull("eos_token_id"),
                   Obeyed("tie_word_embeddings", "false"),
                   Obeyed("attention_bias", "false"),
                   Obeyed("use_sliding_window", "false"),
                   OrNull("sliding_window", "4096"),
                   Obeyed("num_experts", "128"),
                   OtherName("num_local_experts", "num_experts"),
                   Obeyed("num_experts_per_tok", "8"),
                   Obeyed("moe_intermediate_size", "768"),
                   Obeyed("decoder_sparse_step", "1"),
                   OrNull("mlp_only_layers"),
                   Obeyed("norm_topk_prob", "false"),
               }});
}

}  // namespace tandem
