#include "common/model/families/keys/common_keys.h"

namespace tandem {

ConfigKeys EveryClassKeys() {
  return {
      Only("is_causal", "true", "bidirectional attention"),
      Only("is_encoder_decoder", "false", "an encoder"),
      Only("per_layer_config", "null", "a separate configuration per layer"),
      Only("attention_chunk_size", "null", "chunked attention"),
      Only("quantization_config", "null", "a quantised checkpoint"),
      Only("transformers_weights", "null", "a weight file other than model.safetensors"),
      // The type of the computation is the servers' setting compute.dtype.
      NoEffect("dtype"),
      NoEffect("torch_dtype"),
      // Names and versions.
      NoEffect("architectures"),
      NoEffect("model_type"),
      NoEffect("name_or_path"),
      NoEffect("transformers_version"),
      // The kernels of `transformers`, and what it returns beside logits.
      NoEffect("attn_implementation"),
      NoEffect("experts_implementation"),
      NoEffect("chunk_size_feed_forward"),
      NoEffect("gradient_checkpointing"),
      NoEffect("output_attentions"),
      NoEffect("output_hidden_states"),
      NoEffect("return_dict"),
      NoEffect("use_cache"),
      // Classifiers, and their dropout.
      NoEffect("classifier_dropout"),
      NoEffect("hidden_dropout"),
      NoEffect("id2label"),
      NoEffect("label2id"),
      NoEffect("num_labels"),
      NoEffect("problem_type"),
      NoEffect("token_classification_bias"),
  };
}

ConfigKeys TextKeys(const char* rope_theta) {
  return Join({
      EveryClassKeys(),
      {
          Obeyed("initializer_range", "0.02"),  // of new value heads
          OrNull("rope_parameters"),
          OrNull("rope_scaling"),
          Obeyed("rope_theta", rope_theta),
          OrNull("partial_rotary_factor"),
          // Log-probs are those of a model that is not training, for which dropout is off.
          NoEffect("attention_dropout"),
          NoEffect("bos_token_id"),
          // `transformers` gives the embedding of the padding token no gradient. Here it trains as
          // any other, where a sequence contains it (docs/guides/losses/objectives.md).
          NoEffect("pad_token_id"),
      },
  });
}

ConfigKeys SameLayerKeys() {
  return {
      OrNull("layer_types"),  // must say what the class computes without it
      Only("use_bidirectional_attention", "false", "bidirectional attention"),
  };
}

ConfigKeys QwenWindowKeys(const char* max_window_layers) {
  return {
      Obeyed("use_sliding_window", "false"),
      OrNull("sliding_window", "4096"),
      Obeyed("max_window_layers", max_window_layers),
      OrNull("layer_types"),
  };
}

ConfigKeys RouterKeys() {
  return {
      // Losses of routers are settings of trainer and critic.
      NoEffect("output_router_logits"),
      NoEffect("router_aux_loss_coef"),
  };
}

}  // namespace tandem
