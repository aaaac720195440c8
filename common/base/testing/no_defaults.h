// For tests: checks that every field of a struct differs from its default, so that a conversion
// that drops a field is noticed.
#ifndef TANDEM_COMMON_BASE_TESTING_NO_DEFAULTS_H_
#define TANDEM_COMMON_BASE_TESTING_NO_DEFAULTS_H_

#include <gtest/gtest.h>

#include <cstddef>
#include <string>
#include <typeinfo>
#include <variant>
#include <vector>

#include "common/base/struct_bytes.h"

namespace tandem {

template <typename... T>
void ExpectNoDefaults(const std::variant<T...>& value);
template <typename T>
void ExpectNoDefaults(const std::vector<T>& value);

// Checks the structs inside `value`, too.
template <typename T>
void ExpectNoDefaults(const T& value) {
  if constexpr (struct_bytes::Struct<T>) {
    std::vector<std::string> by_default;
    const T initial{};
    struct_bytes::ForEachField(initial,
                               [&](const auto& field) { by_default.push_back(ToBytes(field)); });
    size_t i = 0;
    struct_bytes::ForEachField(value, [&](const auto& field) {
      EXPECT_NE(ToBytes(field), by_default[i]) << "field " << i << " of " << typeid(T).name();
      ++i;
      ExpectNoDefaults(field);
    });
  }
}

template <typename... T>
void ExpectNoDefaults(const std::variant<T...>& value) {
  std::visit([](const auto& held) { ExpectNoDefaults(held); }, value);
}

template <typename T>
void ExpectNoDefaults(const std::vector<T>& value) {
  for (const T& item : value) ExpectNoDefaults(item);
}

}  // namespace tandem

#endif  // TANDEM_COMMON_BASE_TESTING_NO_DEFAULTS_H_
