// A digest over the fields of a request, to tell a repeat from another request.
#ifndef TANDEM_COMMON_CHECKPOINT_PAYLOAD_HASHER_H_
#define TANDEM_COMMON_CHECKPOINT_PAYLOAD_HASHER_H_

#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

#include "common/tensor/checksum.h"

namespace tandem::checkpoint {

// Lengths are hashed before contents, so that fields cannot run into each other. Numbers are hashed
// by their bytes. Add the number of elements before a list of structures.
class PayloadHasher {
 public:
  template <typename... Fields>
  PayloadHasher& Add(const Fields&... fields) {
    (AddOne(fields), ...);
    return *this;
  }

  // 32 hex digits.
  std::string Hex() const { return checksum_.Hex(); }

 private:
  template <typename T>
  void AddOne(const T& value) {
    static_assert(std::is_arithmetic_v<T> || std::is_enum_v<T>);
    checksum_.Update(&value, sizeof(value));
  }
  void AddOne(const std::string& text) {
    AddOne(text.size());
    checksum_.Update(text.data(), text.size());
  }
  template <typename T>
  void AddOne(const std::vector<T>& numbers) {
    static_assert(std::is_arithmetic_v<T>);
    AddOne(numbers.size());
    checksum_.Update(numbers.data(), numbers.size() * sizeof(T));
  }

  Checksum checksum_;
};

}  // namespace tandem::checkpoint

#endif  // TANDEM_COMMON_CHECKPOINT_PAYLOAD_HASHER_H_
