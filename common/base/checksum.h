// XXH3 digests of weights, files, transfers (https://xxhash.com). They detect corruption, not
// malice.
#ifndef TANDEM_COMMON_BASE_CHECKSUM_H_
#define TANDEM_COMMON_BASE_CHECKSUM_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace tandem {

// Incremental XXH3-128. Any split of the input gives the same digest.
class Checksum {
 public:
  Checksum();
  ~Checksum();
  Checksum(Checksum&&) noexcept;
  Checksum& operator=(Checksum&&) noexcept;

  Checksum& Update(const void* data, size_t bytes);

  // 32 lower-case hex digits, canonical (big-endian) order. Does not end the stream.
  std::string Hex() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// XXH3-64 of one buffer: the checksum of a transfer chunk.
uint64_t Xxh3_64(const void* data, size_t bytes);

}  // namespace tandem

#endif  // TANDEM_COMMON_BASE_CHECKSUM_H_
