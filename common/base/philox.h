// Counter-based randomness: Philox4x32-10 (Salmon, Moraes, Dror, Shaw 2011, "Parallel random
// numbers: as easy as 1, 2, 3"). A draw is a pure function of its purpose and position, so nothing
// that happens around a sequence (batching, preemption, a restart) can change it.
//
// The function is written out here because the code that draws does not depend on libtorch, whose
// generator also hides the counter; C++ has std::philox4x32 from C++26 on.
#ifndef TANDEM_COMMON_BASE_PHILOX_H_
#define TANDEM_COMMON_BASE_PHILOX_H_

#include <array>
#include <cstdint>

namespace tandem {

using PhiloxCounter = std::array<uint32_t, 4>;
using PhiloxKey = std::array<uint32_t, 2>;

// The ten-round Philox4x32 block function; matches Random123's known-answer vectors.
std::array<uint32_t, 4> Philox4x32(PhiloxCounter counter, PhiloxKey key);

// The decision that a draw is for. Values are part of the protocol: never renumber them.
enum class RandomPurpose : uint32_t {
  kAuthor = 0,  // who writes token t
  kToken = 1,   // which token the author writes
  // Rejection sampling alone (docs/adr/0051):
  kDraft = 2,     // which token the junior drafts
  kAccept = 3,    // whether a draft is accepted
  kResidual = 4,  // which token replaces a rejected draft
};

// The uniform number in [0, 1) of response position `t` of one sample, with 53 random bits:
//   key = (seed low, seed high), counter = (t, sample low, sample high, purpose),
//   u = ((w0 >> 5) * 2^26 + (w1 >> 6)) * 2^-53.
double Uniform(uint64_t seed, uint64_t sample_index, uint32_t t, RandomPurpose purpose);

}  // namespace tandem

#endif  // TANDEM_COMMON_BASE_PHILOX_H_
