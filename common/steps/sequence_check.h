// Checks of every sequence that reaches the model of a trainer or critic.
#ifndef TANDEM_COMMON_STEPS_SEQUENCE_CHECK_H_
#define TANDEM_COMMON_STEPS_SEQUENCE_CHECK_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace tandem::training {

struct SequenceLimits {
  int64_t num_token_ids = 0;
  int64_t max_model_len = 0;
};

// INVALID_ARGUMENT ("prompt_token_ids[3]") unless there are a prompt and a response token, and all
// ids are in the vocabulary; OUT_OF_RANGE if prompt and response are longer than max_model_len.
absl::Status CheckSequence(absl::Span<const int32_t> prompt, absl::Span<const int32_t> response,
                           const SequenceLimits& limits);

// INVALID_ARGUMENT unless `numbers` has `length` finite entries ("<field>[i]").
absl::Status CheckPerToken(absl::string_view field, absl::Span<const float> numbers, size_t length);

// As CheckPerToken, and INVALID_ARGUMENT also for a number that is above 0 by more than rounding:
// they are logarithms of probabilities.
absl::Status CheckLogProbs(absl::string_view field, absl::Span<const float> numbers, size_t length);

}  // namespace tandem::training

#endif  // TANDEM_COMMON_STEPS_SEQUENCE_CHECK_H_
