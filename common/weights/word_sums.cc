#include "common/weights/word_sums.h"

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstring>

#include "common/base/checksum.h"

namespace tandem {
namespace {

static_assert(std::endian::native == std::endian::little);

// splitmix64 (https://prng.di.unimi.it/splitmix64.c): the number at place `index` of its sequence
// from 0.
uint64_t SplitMix(uint64_t index) {
  uint64_t z = (index + 1) * 0x9e3779b97f4a7c15;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
  z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
  return z ^ (z >> 31);
}

// Adds word * key for `count` words, of which the first has the keys at `from`, in every sum.
WordSums SumBlock(const unsigned char* words, int64_t from, int64_t count) {
  const uint32_t* const first = WordKeys()[0].data() + from;
  const uint32_t* const second = WordKeys()[1].data() + from;
  WordSums sums;
  int64_t i = 0;
#ifdef __SSE2__
  // A product takes the even words of its operands, so every vector is multiplied twice.
  __m128i totals[2] = {_mm_setzero_si128(), _mm_setzero_si128()};
  const auto load = [](const void* from) {
    return _mm_loadu_si128(static_cast<const __m128i*>(from));
  };
  for (; i + 4 <= count; i += 4) {
    const __m128i even = load(words + i * 4), odd = _mm_srli_epi64(even, 32);
    const __m128i keys[2] = {load(first + i), load(second + i)};
    for (int sum = 0; sum < 2; ++sum) {
      const __m128i products = _mm_add_epi64(_mm_mul_epu32(even, keys[sum]),
                                             _mm_mul_epu32(odd, _mm_srli_epi64(keys[sum], 32)));
      totals[sum] = _mm_add_epi64(totals[sum], products);
    }
  }
  uint64_t lanes[2][2];
  std::memcpy(lanes, totals, sizeof(lanes));
  sums = {.first = lanes[0][0] + lanes[0][1], .second = lanes[1][0] + lanes[1][1]};
#endif
  for (; i < count; ++i) {
    uint32_t word;
    std::memcpy(&word, words + i * 4, sizeof(word));
    sums.first += uint64_t{word} * first[i];
    sums.second += uint64_t{word} * second[i];
  }
  return sums;
}

}  // namespace

const std::array<BlockKeys, 2>& WordKeys() {
  static const std::array<BlockKeys, 2> keys = [] {
    std::array<BlockKeys, 2> made = {};
    for (size_t sum = 0; sum < 2; ++sum) {
      for (size_t i = 0; i < kWordsOfBlock; ++i)
        made[sum][i] = static_cast<uint32_t>(SplitMix(2 * i + sum) >> 32);
    }
    return made;
  }();
  return keys;
}

uint64_t KeyOfBlock(int64_t sum, int64_t block) {
  // Behind the keys of words.
  return SplitMix(2 * static_cast<uint64_t>(kWordsOfBlock + block) + static_cast<uint64_t>(sum)) |
         1;
}

WordSums SumWords(int64_t begin, const void* words, int64_t count) {
  const auto* data = static_cast<const unsigned char*>(words);
  WordSums sums;
  for (int64_t at = begin; at < begin + count;) {
    const int64_t block = at / kWordsOfBlock, from = at % kWordsOfBlock;
    const int64_t size = std::min(kWordsOfBlock - from, begin + count - at);
    const WordSums of_block = SumBlock(data, from, size);
    sums.first += KeyOfBlock(0, block) * of_block.first;
    sums.second += KeyOfBlock(1, block) * of_block.second;
    at += size;
    data += size * 4;
  }
  return sums;
}

WordSums SumBytes(int64_t begin, const void* data, int64_t bytes) {
  const int64_t words = bytes / 4;
  WordSums sums = SumWords(begin, data, words);
  if (const int64_t rest = bytes % 4; rest > 0) {
    uint32_t last = 0;
    std::memcpy(&last, static_cast<const char*>(data) + words * 4, static_cast<size_t>(rest));
    sums += SumWords(begin + words, &last, 1);
  }
  return sums;
}

WordSums TensorSums::Of(absl::string_view name) const {
  const auto found = sums_.find(std::string(name));
  return found == sums_.end() ? WordSums() : found->second;
}

std::string TensorSums::Digest() const {
  Checksum checksum;
  for (const auto& [name, sums] : sums_) {
    const uint64_t size = name.size();  // keeps names from running into the sums
    checksum.Update(&size, sizeof(size)).Update(name.data(), name.size());
    checksum.Update(&sums.first, sizeof(sums.first)).Update(&sums.second, sizeof(sums.second));
  }
  return checksum.Hex();
}

}  // namespace tandem
