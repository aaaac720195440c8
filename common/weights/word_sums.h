// Sums over the 32-bit words of a tensor, from which the digest of weights is made
// (weights_digest.h). No torch.
//
// A tensor's words are hashed in blocks of 256 by multilinear hashing
// (https://arxiv.org/abs/1202.4961), and the hashes of blocks are added up, each multiplied by an
// odd number that depends on the number of the block. All of it is arithmetic modulo 2^64, so that
// sums of any ranges of the words, made in any order by any rank, add up to the sums of the tensor.
// docs/adr/0072 has the formula, for other implementations.
#ifndef TANDEM_COMMON_WEIGHTS_WORD_SUMS_H_
#define TANDEM_COMMON_WEIGHTS_WORD_SUMS_H_

#include <array>
#include <cstdint>
#include <map>
#include <string>

#include "absl/strings/string_view.h"

namespace tandem {

// Two sums: two tensors that differ, chosen without regard to the keys, have the same ones with a
// probability of about 2^-64.
struct WordSums {
  uint64_t first = 0, second = 0;

  WordSums& operator+=(const WordSums& other) {
    first += other.first;
    second += other.second;
    return *this;
  }
  bool operator==(const WordSums&) const = default;
};

inline constexpr int64_t kWordsOfBlock = 256;

// The most words that a device sums up at a time (weights_digest.h), and the bytes that a word
// takes there with its place and keys.
inline constexpr int64_t kDeviceWords = int64_t{1} << 22;
inline constexpr int64_t kDeviceBytesOfWord = 64;

// Keys of the two sums: of the words of every block, and of the blocks, which are odd.
using BlockKeys = std::array<uint32_t, kWordsOfBlock>;
const std::array<BlockKeys, 2>& WordKeys();
uint64_t KeyOfBlock(int64_t sum, int64_t block);

// Returns the sums of `count` words, of which the first is word `begin` of its tensor. Words are
// little endian; `words` needs no alignment.
WordSums SumWords(int64_t begin, const void* words, int64_t count);
// Returns the sums of `bytes` bytes from word `begin` on; a last shorter word is filled with zeros.
WordSums SumBytes(int64_t begin, const void* data, int64_t bytes);

// The sums of tensors, by name.
class TensorSums {
 public:
  void Add(absl::string_view name, const WordSums& sums) { sums_[std::string(name)] += sums; }
  // Adds a whole tensor of `bytes` bytes.
  void AddTensor(absl::string_view name, const void* data, int64_t bytes) {
    Add(name, SumBytes(0, data, bytes));
  }
  bool empty() const { return sums_.empty(); }
  // Returns sums of 0 for a name that was not added.
  WordSums Of(absl::string_view name) const;

  // Returns the XXH3-128 of all names, in ascending order, and their sums: 32 hexadecimal digits.
  std::string Digest() const;

 private:
  std::map<std::string, WordSums> sums_;
};

}  // namespace tandem

#endif  // TANDEM_COMMON_WEIGHTS_WORD_SUMS_H_
