// Plain structs as bytes and back, for the processes of one service, which are of one binary: the
// bytes have the machine's byte order, and say nothing of types or versions. Nothing is lost, not
// even the payload of a NaN.
//
// A struct's fields are found by Boost.PFR, so that none can be forgotten: it counts the
// initialisers that the struct takes, and takes it apart with a structured binding of that many
// names. No binding takes apart a struct with a base class. Such a struct names its base and own
// fields itself, and the compiler compares them with the struct:
//   struct Request : Identity {
//     int64_t count = 0;
//     std::string text;
//     using Base = Identity;
//     static constexpr auto kOwnFields = std::tuple(&Request::count, &Request::text);
//   };
// A field is a number, a bool, an enum class, a std::string, vector, array, map, optional, variant,
// pair, shared_ptr to a constant, which is not null, or another such struct. Anything else does not
// compile.
#ifndef TANDEM_COMMON_BASE_STRUCT_BYTES_H_
#define TANDEM_COMMON_BASE_STRUCT_BYTES_H_

#include <array>
#include <boost/pfr/core.hpp>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace tandem {
namespace struct_bytes {

// Any bits of its size are a value.
template <typename T>
concept Plain = (std::is_arithmetic_v<T> && !std::same_as<T, bool>) ||
                (std::is_enum_v<T> && !std::is_convertible_v<T, int>);

// The element type of a string, vector or map, in a form that can be assigned.
template <typename T>
struct Item {};
template <>
struct Item<std::string> {
  using Type = char;
};
template <typename T>
struct Item<std::vector<T>> {
  using Type = T;
};
template <typename Key, typename Mapped>
struct Item<std::map<Key, Mapped>> {
  using Type = std::pair<Key, Mapped>;
};
template <typename T>
using ItemOf = typename Item<T>::Type;

template <typename T>
concept Sequence = requires {
  typename Item<T>::Type;
};

template <typename T>
concept Derived = requires {
  T::kOwnFields;
};

template <typename T>
concept Struct = std::is_aggregate_v<T> && !std::is_array_v<T>;

// Whether `Own` is all that T adds to its base: T can be initialised from the base and one value
// for each of `Own`, and not from one value more.
template <typename T, typename... Own>
constexpr bool IsComplete(const std::tuple<Own T::*...>& /*own*/) {
  using Base = typename T::Base;
  constexpr bool kTakesAll = requires { T{std::declval<Base>(), std::declval<Own>()...}; };
  constexpr bool kTakesMore = requires { T{std::declval<Base>(), std::declval<Own>()..., {}}; };
  return kTakesAll && !kTakesMore;
}

template <Struct T, typename Visit>
void ForEachField(T& value, Visit visit) {
  if constexpr (Derived<T>) {
    static_assert(IsComplete<std::remove_const_t<T>>(T::kOwnFields),
                  "kOwnFields must name all fields but the base's, in their order");
    using Base = typename T::Base;
    visit(static_cast<std::conditional_t<std::is_const_v<T>, const Base, Base>&>(value));
    std::apply([&](auto... own) { (visit(value.*own), ...); }, T::kOwnFields);
  } else {
    boost::pfr::for_each_field(value, visit);
  }
}

class Writer {
 public:
  template <typename T>
  requires Plain<T> || std::same_as<T, bool>
  void Put(const T& value) { Append(&value, sizeof(T)); }

  template <Sequence T>
  void Put(const T& value) {
    Put(value.size());
    if constexpr (Plain<ItemOf<T>>) {
      Append(value.data(), value.size() * sizeof(ItemOf<T>));
    } else {
      for (const auto& item : value) Put(item);
    }
  }

  template <typename First, typename Second>
  void Put(const std::pair<First, Second>& value) {
    Put(value.first);
    Put(value.second);
  }

  template <typename T>
  void Put(const std::optional<T>& value) {
    Put(value.has_value());
    if (value.has_value()) Put(*value);
  }

  template <typename T, size_t size>
  void Put(const std::array<T, size>& value) {
    for (const T& item : value) Put(item);
  }

  template <typename T>
  void Put(const std::shared_ptr<const T>& value) {
    Put(*value);
  }

  template <typename... T>
  void Put(const std::variant<T...>& value) {
    Put(value.index());
    std::visit([&](const auto& held) { Put(held); }, value);
  }

  template <Struct T>
  void Put(const T& value) {
    ForEachField(value, [&](const auto& field) { Put(field); });
  }

  std::string bytes() && { return std::move(bytes_); }

 private:
  void Append(const void* from, size_t size) {
    bytes_.append(static_cast<const char*>(from), size);
  }

  std::string bytes_;
};

// Get says whether the bytes held such a value. Memory grows only with what has been read.
class Reader {
 public:
  explicit Reader(absl::string_view bytes) : left_(bytes) {}

  template <Plain T>
  bool Get(T& value) {
    return Take(&value, 1);
  }

  template <std::same_as<bool> T>
  bool Get(T& value) {
    uint8_t byte = 0;
    if (!Get(byte) || byte > 1) return false;
    value = byte != 0;
    return true;
  }

  template <Sequence T>
  bool Get(T& value) {
    using Item = ItemOf<T>;
    constexpr size_t kMinItemBytes = Plain<Item> ? sizeof(Item) : 1;
    size_t size = 0;
    if (!Get(size) || size > left_.size() / kMinItemBytes) return false;
    value.clear();
    if constexpr (Plain<Item>) {
      value.resize(size);
      return Take(value.data(), size);
    } else {
      for (size_t i = 0; i < size; ++i) {
        Item item{};
        if (!Get(item)) return false;
        value.insert(value.end(), std::move(item));
      }
      return value.size() == size;  // a map may have met a key again
    }
  }

  template <typename First, typename Second>
  bool Get(std::pair<First, Second>& value) {
    return Get(value.first) && Get(value.second);
  }

  template <typename T>
  bool Get(std::optional<T>& value) {
    bool has_value = false;
    if (!Get(has_value)) return false;
    value.reset();
    return !has_value || Get(value.emplace());
  }

  template <typename T, size_t size>
  bool Get(std::array<T, size>& value) {
    for (T& item : value) {
      if (!Get(item)) return false;
    }
    return true;
  }

  template <typename T>
  bool Get(std::shared_ptr<const T>& value) {
    auto held = std::make_shared<T>();
    if (!Get(*held)) return false;
    value = std::move(held);
    return true;
  }

  template <typename... T>
  bool Get(std::variant<T...>& value) {
    size_t index = 0;
    if (!Get(index)) return false;
    return [&]<size_t... I>(std::index_sequence<I...>) {
      return ((I == index && Get(value.template emplace<I>())) || ...);
    }
    (std::index_sequence_for<T...>());
  }

  template <Struct T>
  bool Get(T& value) {
    bool ok = true;
    ForEachField(value, [&](auto& field) { ok = ok && Get(field); });
    return ok;
  }

  size_t left() const { return left_.size(); }

 private:
  template <typename T>
  bool Take(T* to, size_t count) {
    if (count > left_.size() / sizeof(T)) return false;
    if (count > 0) std::memcpy(to, left_.data(), count * sizeof(T));
    left_.remove_prefix(count * sizeof(T));
    return true;
  }

  absl::string_view left_;
};

}  // namespace struct_bytes

template <typename T>
std::string ToBytes(const T& value) {
  struct_bytes::Writer writer;
  writer.Put(value);
  return std::move(writer).bytes();
}

// DATA_LOSS for bytes that ToBytes did not make of a T: cut off, too long, with a length, a bool or
// an index that cannot be. What is no such contradiction passes: there is no checksum.
template <typename T>
absl::StatusOr<T> FromBytes(absl::string_view bytes) {
  struct_bytes::Reader reader(bytes);
  T value{};
  if (!reader.Get(value)) {
    return absl::DataLossError(absl::StrCat("a struct's bytes are broken or cut off, ",
                                            reader.left(), " of ", bytes.size(),
                                            " bytes before their end"));
  }
  if (reader.left() > 0) {
    return absl::DataLossError(absl::StrCat(reader.left(), " bytes follow a struct's bytes"));
  }
  return value;
}

}  // namespace tandem

#endif  // TANDEM_COMMON_BASE_STRUCT_BYTES_H_
