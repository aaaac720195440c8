// The parameters of a dense decoder. No torch; decoder.h runs it.
#ifndef TANDEM_COMMON_MODEL_DECODER_PARAMETERS_H_
#define TANDEM_COMMON_MODEL_DECODER_PARAMETERS_H_

#include <vector>

#include "common/model/model_config.h"
#include "common/model/parameter_spec.h"

namespace tandem {

// How the families that are dense decoders differ.
struct DecoderOptions {
  bool qkv_bias = false;
  bool output_bias = false;  // of the attention's output projection
  bool mlp_bias = false;
  bool qk_norm = false;  // RMSNorm of every query and key head, before the rotation
};

// Under the names of Hugging Face ("model.layers.0..."), without a head.
std::vector<ParameterSpec> DenseDecoderParameters(const ModelConfig& config,
                                                  const DecoderOptions& options);

}  // namespace tandem

#endif  // TANDEM_COMMON_MODEL_DECODER_PARAMETERS_H_
