#include "common/base/checksum.h"

#include <xxhash.h>

#include <new>

namespace tandem {
namespace {

std::string ToHex(XXH128_hash_t hash) {
  XXH128_canonical_t canonical;
  XXH128_canonicalFromHash(&canonical, hash);
  constexpr char kDigits[] = "0123456789abcdef";
  std::string hex;
  hex.reserve(2 * sizeof(canonical.digest));
  for (const unsigned char byte : canonical.digest) {
    hex.push_back(kDigits[byte >> 4]);
    hex.push_back(kDigits[byte & 15]);
  }
  return hex;
}

}  // namespace

struct Checksum::State {
  struct Deleter {
    void operator()(XXH3_state_t* state) const { XXH3_freeState(state); }
  };
  std::unique_ptr<XXH3_state_t, Deleter> xxh{XXH3_createState()};
};

Checksum::Checksum() : state_(std::make_unique<State>()) {
  if (state_->xxh == nullptr) throw std::bad_alloc();
  XXH3_128bits_reset(state_->xxh.get());
}
Checksum::~Checksum() = default;
Checksum::Checksum(Checksum&&) noexcept = default;
Checksum& Checksum::operator=(Checksum&&) noexcept = default;

Checksum& Checksum::Update(const void* data, size_t bytes) {
  XXH3_128bits_update(state_->xxh.get(), data, bytes);
  return *this;
}

std::string Checksum::Hex() const { return ToHex(XXH3_128bits_digest(state_->xxh.get())); }

uint64_t Xxh3_64(const void* data, size_t bytes) { return XXH3_64bits(data, bytes); }

}  // namespace tandem
