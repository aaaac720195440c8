// How far tables of rotary position embeddings (rotary_table.h) grow. No torch: the memory plan
// counts them before any exists.
#ifndef TANDEM_COMMON_OPS_ROTARY_ROTARY_GROWTH_H_
#define TANDEM_COMMON_OPS_ROTARY_ROTARY_GROWTH_H_

#include <algorithm>
#include <cstdint>

namespace tandem::ops {

// Returns the number of positions of a table that had `have` and is asked for those below `end`. It
// doubles, but not beyond `limit`, the longest sequence of its model.
inline int64_t RotaryTableLength(int64_t have, int64_t end, int64_t limit) {
  constexpr int64_t kFirstLength = 512;
  return std::max(end, std::min(limit, std::max(2 * have, kFirstLength)));
}

}  // namespace tandem::ops

#endif  // TANDEM_COMMON_OPS_ROTARY_ROTARY_GROWTH_H_
