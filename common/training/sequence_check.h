// What trainer and critic ask of every sequence before it reaches the model.
#ifndef TANDEM_COMMON_TRAINING_SEQUENCE_CHECK_H_
#define TANDEM_COMMON_TRAINING_SEQUENCE_CHECK_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace tandem::training {

struct SequenceLimits {
  int64_t vocab_size = 0;
  int64_t max_model_len = 0;
};

// At least one prompt and one response token, ids inside the vocabulary: else INVALID_ARGUMENT
// ("prompt_token_ids[3]"); prompt and response together within max_model_len: else OUT_OF_RANGE.
absl::Status CheckSequence(absl::Span<const int32_t> prompt, absl::Span<const int32_t> response,
                           const SequenceLimits& limits);

// INVALID_ARGUMENT unless `numbers` has `length` finite entries ("<field>[i]").
absl::Status CheckPerToken(absl::string_view field, absl::Span<const float> numbers, size_t length);

// CheckPerToken, and none above 0 by more than rounding: they are logarithms of probabilities.
absl::Status CheckLogProbs(absl::string_view field, absl::Span<const float> numbers, size_t length);

}  // namespace tandem::training

#endif  // TANDEM_COMMON_TRAINING_SEQUENCE_CHECK_H_
