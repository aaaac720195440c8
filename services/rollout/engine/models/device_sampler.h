// Draws tokens on the device of the logits, so that a few numbers of each row come to the host in
// place of the row.
#ifndef TANDEM_SERVICES_ROLLOUT_ENGINE_MODELS_DEVICE_SAMPLER_H_
#define TANDEM_SERVICES_ROLLOUT_ENGINE_MODELS_DEVICE_SAMPLER_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>

#include "absl/status/statusor.h"
#include "common/coauthoring/tandem_sampler.h"
#include "services/rollout/engine/models/model_runner.h"

namespace tandem::rollout {

// Whether a row of a pass can be drawn on a device: it has neither a draft nor a wanted
// distribution. The log-prob of a token of the vocabulary can always be computed there.
bool DrawsOnDevice(const OutputRow& row, int64_t num_token_ids);

// Draws a token from each row of logits [N, V] on a device, of any floating-point type. Returns
// numbers [N, 4] on the device, for ReadDrawn; the host does not wait. Every row must satisfy
// DrawsOnDevice.
at::Tensor DrawOnDevice(const at::Tensor& logits, std::span<const OutputRow> rows);

// Overwrites `results`, one for each row, with those of TandemSampler for the logits from which
// `drawn`, copied to the host, was drawn. For equal logits a token is the same, but where a number
// lies within rounding of the border between two tokens, or of a cut; log-probs are the same up to
// rounding.
void ReadDrawn(const at::Tensor& drawn, std::span<absl::StatusOr<SampledToken>> results);

}  // namespace tandem::rollout

#endif  // TANDEM_SERVICES_ROLLOUT_ENGINE_MODELS_DEVICE_SAMPLER_H_
