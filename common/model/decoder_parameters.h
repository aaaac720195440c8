// The parameters of a dense decoder. No torch; decoder.h runs it.
#ifndef TANDEM_COMMON_MODEL_DECODER_PARAMETERS_H_
#define TANDEM_COMMON_MODEL_DECODER_PARAMETERS_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
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

// Whether `shard_count` ranks can share out the heads, the rows and columns of the MLP, and the
// vocabulary. INVALID_ARGUMENT for `field`, which is where the number comes from, names the size
// that does not divide.
absl::Status CheckDecoderShards(const ModelConfig& config, int64_t shard_count,
                                absl::string_view field);

}  // namespace tandem

#endif  // TANDEM_COMMON_MODEL_DECODER_PARAMETERS_H_
