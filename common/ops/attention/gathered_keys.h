// How many numbers of a cache attention copies side by side at a time. No torch: the memory plan
// counts them.
#ifndef TANDEM_COMMON_OPS_ATTENTION_GATHERED_KEYS_H_
#define TANDEM_COMMON_OPS_ATTENTION_GATHERED_KEYS_H_

#include <cstdint>

namespace tandem::ops {

// At most this many numbers of keys, and as many of values, where sequences attend together on a
// GPU; more for one sequence that has more.
inline constexpr int64_t kGatheredNumbers = int64_t{1} << 26;

}  // namespace tandem::ops

#endif  // TANDEM_COMMON_OPS_ATTENTION_GATHERED_KEYS_H_
