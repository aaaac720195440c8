#include "common/weights/weights_digest.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include "common/tensor/aten/aten_bytes.h"
#include "common/weights/finite_values.h"
#include "common/weights/gpu/gpu_intake.h"

namespace tandem {
namespace {

// The same as the sums of an update's bytes (TensorSums).
TEST(WeightsDigestTest, TheDigestIsThatOfTheValuesAsFloat32) {
  const at::Tensor wide = at::randn({700, 1000}), narrow = at::randn({3, 5}).to(at::kBFloat16);
  TensorSums sums;
  sums.AddTensor("wide", wide.const_data_ptr(), wide.numel() * 4);
  const at::Tensor widened = narrow.to(at::kFloat);
  sums.AddTensor("narrow", widened.const_data_ptr(), widened.numel() * 4);
  EXPECT_EQ(WeightsDigest({{"wide", wide}, {"narrow", narrow}}), sums.Digest());
  EXPECT_EQ(WeightsDigest({{"narrow", narrow}, {"wide", wide}}), sums.Digest());
  EXPECT_EQ(WeightsDigest({{"wide", wide.t().contiguous().t()}, {"narrow", narrow}}),
            sums.Digest());
}

TEST(WeightsDigestTest, RowsOfATensorAddUp) {
  const at::Tensor tensor = at::randn({40, 1'000});
  const std::string whole = WeightsDigest({{"w", tensor}});
  WeightsHasher ranges;
  for (const auto& [begin, end] :
       std::vector<std::pair<int64_t, int64_t>>{{30'001, 40'000}, {0, 1}, {1, 30'001}}) {
    ranges.AddRows("w", begin, 0, tensor.view({1, -1}).slice(1, begin, end));
  }
  EXPECT_EQ(ranges.Hex(), whole);
  WeightsHasher columns;
  for (const auto& [begin, end] :
       std::vector<std::pair<int64_t, int64_t>>{{300, 1'000}, {0, 300}}) {
    columns.AddRows("w", begin, 1'000, tensor.slice(1, begin, end));
  }
  EXPECT_EQ(columns.Hex(), whole);
}

// What a device computes, here on the CPU.
TEST(WeightsDigestTest, SumsOnADeviceAreThoseOfTheHost) {
  const auto expect_same = [](int64_t begin, int64_t stride, const at::Tensor& values) {
    WeightsHasher hasher;
    hasher.AddRows("w", begin, stride, values);
    const WordSums expected = hasher.Sums().Of("w");
    const at::Tensor sums = SumWordsOnDevice(begin, stride, values.contiguous());
    EXPECT_EQ(static_cast<uint64_t>(sums[0].item<int64_t>()), expected.first) << begin;
    EXPECT_EQ(static_cast<uint64_t>(sums[1].item<int64_t>()), expected.second) << begin;
  };
  const at::Tensor wide = at::randn({1, (int64_t{1} << 22) + 5'000});
  expect_same(0, 0, wide);
  expect_same(300, 0, wide.slice(1, 300));
  expect_same(255, 0, wide.slice(1, 255, 258));
  const at::Tensor matrix = at::randn({3'000, 2'000});
  expect_same(700, 2'000, matrix.slice(1, 700, 1'100));
  expect_same(0, 2'000, matrix);
}

TEST(WeightsDigestTest, SumsOfBytesOnADeviceAreThoseOfTheHost) {
  for (const int64_t count : {1, 2, 3, 300, 1'001}) {
    for (const at::ScalarType type : {at::kBFloat16, at::kFloat}) {
      const at::Tensor values = at::randn({count}).to(type);
      const at::Tensor sums = SumBytesOnDevice(5, values);
      const WordSums expected =
          SumBytes(5, values.const_data_ptr(), static_cast<int64_t>(values.nbytes()));
      EXPECT_EQ(static_cast<uint64_t>(sums[0].item<int64_t>()), expected.first) << count;
      EXPECT_EQ(static_cast<uint64_t>(sums[1].item<int64_t>()), expected.second) << count;
    }
  }
}

TEST(WeightsDigestTest, TheFirstValueThatIsNotFiniteIsFound) {
  constexpr int64_t kCount = (int64_t{1} << 24) + 100;  // more than are checked at a time
  const double infinity = std::numeric_limits<double>::infinity();
  for (const at::ScalarType type : {at::kBFloat16, at::kFloat}) {
    const at::Tensor values = at::zeros({kCount}, type);
    const auto on_host = [&] {
      return FirstNotFinite(
          FromScalarType(type).value(),
          {static_cast<const std::byte*>(values.const_data_ptr()), values.nbytes()});
    };
    EXPECT_EQ(on_host(), std::nullopt);
    EXPECT_EQ(FirstNotFiniteOnDevice(values).item<int64_t>(), std::numeric_limits<int64_t>::max());
    for (const auto& [place, value] : std::vector<std::pair<int64_t, double>>{
             {kCount - 1, -infinity}, {kCount - 5, NAN}, {7, infinity}, {3, NAN}}) {
      values[place].fill_(value);
      EXPECT_EQ(FirstNotFiniteOnDevice(values).item<int64_t>(), place);
      EXPECT_EQ(on_host(), place);
    }
  }
  EXPECT_EQ(FirstNotFiniteOnDevice(at::zeros({0})).item<int64_t>(),
            std::numeric_limits<int64_t>::max());
}

TEST(WeightsDigestTest, TensorsMayGoAsSoonAsTheyAreVisited) {
  const NamedTensors tensors = {
      {"a", at::arange(6, at::kFloat)}, {"b", at::ones({2, 2})}, {"c", at::full({3}, 7.0)}};
  const auto source = [&](TensorVisitor visit) -> absl::Status {
    const at::Tensor memory = at::empty({6});  // every tensor has this memory
    for (const auto& [name, tensor] : tensors) {
      const at::Tensor here = memory.narrow(0, 0, tensor.numel()).view(tensor.sizes());
      here.copy_(tensor);
      if (absl::Status visited = visit(name, here); !visited.ok()) return visited;
    }
    return absl::OkStatus();
  };
  EXPECT_EQ(WeightsDigest(source).value(), WeightsDigest(tensors));
}

TEST(WeightsDigestTest, AnErrorEndsIt) {
  absl::Status lost = absl::UnavailableError("lost");
  EXPECT_EQ(WeightsDigest([&](TensorVisitor) { return lost; }).status(), lost);
}

}  // namespace
}  // namespace tandem
