// The window of keys that a row of causal attention sees.
#ifndef TANDEM_COMMON_KERNELS_ATTENTION_WINDOW_H_
#define TANDEM_COMMON_KERNELS_ATTENTION_WINDOW_H_

#include <cstdint>

namespace tandem {

// A window of W: the row at position p attends to the keys at positions p - W + 1 to p, its own
// among them (`sliding_window` of Hugging Face). This one holds any sequence.
inline constexpr int64_t kNoWindow = INT64_MAX;

// Returns the first position that the row at `position` attends to. Always inlined: kernels that
// are compiled for one CPU may not leave a copy behind for others.
__attribute__((always_inline)) inline int64_t FirstKey(int64_t position, int64_t window) {
  return position < window ? 0 : position - window + 1;
}

// Returns the most blocks of `block_tokens` positions in which the keys of a window lie.
inline int64_t WindowBlocks(int64_t window, int64_t block_tokens) {
  return window == kNoWindow ? kNoWindow : (window + block_tokens - 1) / block_tokens + 1;
}

}  // namespace tandem

#endif  // TANDEM_COMMON_KERNELS_ATTENTION_WINDOW_H_
