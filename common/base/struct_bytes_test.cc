#include "common/base/struct_bytes.h"

#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

namespace tandem {
namespace {

enum class Colour : uint8_t { kRed, kBlue };

struct Inner {
  int32_t count = 0;
  std::vector<float> numbers;

  bool operator==(const Inner&) const = default;
};

struct Identity {
  std::string id;
  int64_t step = 0;

  bool operator==(const Identity&) const = default;
};

struct Everything : Identity {
  bool flag = false;
  Colour colour = Colour::kRed;
  double number = 0;
  Inner inner;
  std::vector<Inner> inners;
  std::vector<std::string> texts;
  std::vector<bool> bits;
  std::vector<Colour> colours;
  std::map<std::string, double> map;
  std::pair<uint8_t, std::string> pair;
  std::optional<double> given, missing;
  std::variant<Inner, std::string> variant;

  using Base = Identity;
  static constexpr auto kOwnFields =
      std::tuple(&Everything::flag, &Everything::colour, &Everything::number, &Everything::inner,
                 &Everything::inners, &Everything::texts, &Everything::bits, &Everything::colours,
                 &Everything::map, &Everything::pair, &Everything::given, &Everything::missing,
                 &Everything::variant);
  bool operator==(const Everything&) const = default;
};

Everything Example() {
  Everything value;
  value.id = std::string("a\0b", 3);
  value.step = -7;
  value.flag = true;
  value.colour = Colour::kBlue;
  value.number = 1e300;
  value.inner = {.count = 3, .numbers = {1.5f, -0.0f}};
  value.inners = {value.inner, {}, {.count = -1, .numbers = {2}}};
  value.texts = {"", "text"};
  value.bits = {true, false, true};
  value.colours = {Colour::kBlue, Colour::kRed};
  value.map = {{"x", 1}, {"y", -2}};
  value.pair = {200, "pair"};
  value.given = 0.25;
  value.variant = "second";
  return value;
}

TEST(StructBytesTest, EveryKindOfFieldComesBack) {
  const Everything value = Example();
  EXPECT_EQ(FromBytes<Everything>(ToBytes(value)).value(), value);
  EXPECT_EQ(FromBytes<Everything>(ToBytes(Everything())).value(), Everything());
}

TEST(StructBytesTest, WhatAStructHeldBeforeIsGone) {
  const std::vector<std::optional<Inner>> value = {std::nullopt, Inner{.count = 1, .numbers = {}}};
  std::vector<std::optional<Inner>> read = {Inner{.count = 2, .numbers = {3}}};
  const std::string bytes = ToBytes(value);
  ASSERT_TRUE(struct_bytes::Reader(bytes).Get(read));
  EXPECT_EQ(read, value);
}

TEST(StructBytesTest, BitsOfNumbersAreKept) {
  constexpr uint64_t kNan = 0xfff4'0000'0000'1234;
  const std::vector<double> values = {std::bit_cast<double>(kNan), -0.0,
                                      std::numeric_limits<double>::denorm_min()};
  const std::vector<double> read = FromBytes<std::vector<double>>(ToBytes(values)).value();
  ASSERT_EQ(read.size(), values.size());
  for (size_t i = 0; i < read.size(); ++i) {
    EXPECT_EQ(std::bit_cast<uint64_t>(read[i]), std::bit_cast<uint64_t>(values[i]));
  }
}

struct Added : Identity {
  int32_t named = 0;
  std::optional<int32_t> forgotten;

  using Base = Identity;
};

TEST(StructBytesTest, AForgottenFieldOfAStructWithABaseIsSeen) {
  using struct_bytes::IsComplete;
  static_assert(IsComplete<Added>(std::tuple(&Added::named, &Added::forgotten)));
  static_assert(!IsComplete<Added>(std::tuple(&Added::named)));
  static_assert(!IsComplete<Added>(std::tuple(&Added::forgotten)));
}

TEST(StructBytesTest, EveryPrefixIsRefused) {
  const std::string bytes = ToBytes(Example());
  for (size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_EQ(FromBytes<Everything>(bytes.substr(0, size)).status().code(),
              absl::StatusCode::kDataLoss)
        << size;
  }
}

TEST(StructBytesTest, TrailingBytesAreRefused) {
  EXPECT_EQ(FromBytes<Everything>(ToBytes(Example()) + '\0').status().code(),
            absl::StatusCode::kDataLoss);
}

// Any byte may be wrong: what comes is an error or some value, and memory stays small.
TEST(StructBytesTest, BrokenBytesDoNoHarm) {
  const std::string bytes = ToBytes(Example());
  for (size_t i = 0; i < bytes.size(); ++i) {
    for (const char broken : {'\x00', '\x01', '\x7f', '\xff'}) {
      std::string copy = bytes;
      copy[i] = broken;
      const absl::StatusOr<Everything> read = FromBytes<Everything>(copy);
      EXPECT_TRUE(read.ok() || read.status().code() == absl::StatusCode::kDataLoss);
    }
  }
}

TEST(StructBytesTest, WhatAPointerSharesIsWrittenWithIt) {
  using Shared = std::map<std::string, std::shared_ptr<const std::string>>;
  const Shared shared = {{"a", std::make_shared<const std::string>("pixels")}};
  const auto read = FromBytes<Shared>(ToBytes(shared));
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(*read->at("a"), "pixels");
}

TEST(StructBytesTest, ArraysKeepTheirItems) {
  const std::array<std::vector<int>, 2> lists = {{{1, 2}, {3}}};
  using Lists = std::array<std::vector<int>, 2>;
  EXPECT_EQ(FromBytes<Lists>(ToBytes(lists)).value(), lists);
  EXPECT_FALSE(FromBytes<Lists>(ToBytes(lists[0])).ok());
}

template <typename T>
bool IsRefused(const std::string& bytes) {
  return FromBytes<T>(bytes).status().code() == absl::StatusCode::kDataLoss;
}

TEST(StructBytesTest, WhatCannotBeIsRefused) {
  const std::string most = ToBytes(std::numeric_limits<size_t>::max());
  EXPECT_TRUE(IsRefused<std::string>(most));
  EXPECT_TRUE(IsRefused<std::vector<double>>(most + "12345678"));
  EXPECT_TRUE(IsRefused<std::vector<std::string>>(most + "12345678"));
  // 2^61 + 1 doubles have the size of one.
  EXPECT_TRUE(IsRefused<std::vector<double>>(ToBytes((size_t{1} << 61) + 1) + "12345678"));
  using Map = std::map<std::string, double>;
  EXPECT_TRUE(IsRefused<Map>(most));
  const std::string one = ToBytes(std::pair(std::string("x"), 1.0));
  EXPECT_FALSE(IsRefused<Map>(ToBytes(size_t{1}) + one));
  EXPECT_TRUE(IsRefused<Map>(ToBytes(size_t{2}) + one + one));
  EXPECT_TRUE(IsRefused<bool>("\x02"));
  EXPECT_TRUE(IsRefused<std::optional<bool>>("\x02\x01"));
  EXPECT_TRUE((IsRefused<std::variant<bool, Colour>>(ToBytes(size_t{2}) + "\x01")));
  EXPECT_TRUE((IsRefused<std::variant<bool, Colour>>(ToBytes(std::variant_npos) + "\x01")));
}

}  // namespace
}  // namespace tandem
