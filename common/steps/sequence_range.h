// A range of consecutive sequences of a batch.
#ifndef TANDEM_COMMON_STEPS_SEQUENCE_RANGE_H_
#define TANDEM_COMMON_STEPS_SEQUENCE_RANGE_H_

#include <cstddef>

#include "absl/types/span.h"

namespace tandem::training {

// The sequences of index [begin, end).
struct SequenceRange {
  size_t begin = 0;
  size_t end = 0;

  // Returns the elements of these sequences from a span with one element for each sequence.
  template <typename T>
  absl::Span<const T> Of(absl::Span<const T> all) const {
    return all.subspan(begin, end - begin);
  }

  bool operator==(const SequenceRange&) const = default;
};

}  // namespace tandem::training

#endif  // TANDEM_COMMON_STEPS_SEQUENCE_RANGE_H_
