#include "common/training/weight_snapshot.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "common/base/checksum.h"
#include "common/tensor/weights_digest.h"

namespace tandem::training {
namespace {

WeightsVersion VersionOf(int64_t version, const NamedTensors& tensors) {
  return {.version = version, .digest = WeightsDigest(tensors)};
}

std::string DigestOfStream(const WeightSource& source) {
  std::vector<std::byte> stream(static_cast<size_t>(source.manifest().total_bytes));
  source.Read(0, absl::MakeSpan(stream));
  return Xxh3Hex(stream.data(), stream.size());
}

TEST(WeightSnapshotTest, ReadsAnyRangeOfTheStreamAndIsACopy) {
  const NamedTensors tensors = {{"a", at::arange(6, at::kFloat).view({2, 3})},
                                {"b", at::full({1}, 7.0)},
                                {"c", at::arange(5, at::kFloat)}};
  std::vector<std::byte> stream;
  for (const auto& [name, tensor] : tensors) {
    const auto* bytes = static_cast<const std::byte*>(tensor.const_data_ptr());
    stream.insert(stream.end(), bytes, bytes + tensor.nbytes());
  }
  const auto snapshot = MakeWeightSnapshot(tensors, VersionOf(4, tensors)).value();
  at::Tensor(tensors[0].second).zero_();
  const WeightManifest& manifest = snapshot->manifest();
  EXPECT_EQ(manifest.version, 4);
  EXPECT_EQ(manifest.total_bytes, static_cast<int64_t>(stream.size()));
  EXPECT_EQ(manifest.digest, Xxh3Hex(stream.data(), stream.size()));
  EXPECT_EQ(manifest.tensors[0].shape, std::vector<int64_t>({2, 3}));
  for (size_t begin = 0; begin < stream.size(); ++begin) {
    for (size_t end = begin + 1; end <= stream.size(); ++end) {
      std::vector<std::byte> part(end - begin);
      snapshot->Read(static_cast<int64_t>(begin), absl::MakeSpan(part));
      ASSERT_EQ(std::memcmp(part.data(), stream.data() + begin, part.size()), 0);
    }
  }
}

TEST(WeightSnapshotTest, HalfPrecisionIsWidenedAndIntegersAreRefused) {
  const at::Tensor half = at::full({3}, 1.5).to(at::kBFloat16);
  const auto snapshot = MakeWeightSnapshot({{"a", half}}, VersionOf(1, {{"a", half}})).value();
  const at::Tensor wide = half.to(at::kFloat);
  EXPECT_EQ(snapshot->manifest().tensors[0].dtype, DType::kFloat32);
  EXPECT_EQ(snapshot->manifest().digest, WeightsDigest({{"a", wide}}));
  EXPECT_EQ(snapshot->manifest().digest, DigestOfStream(*snapshot));
  EXPECT_EQ(DigestOfStream(*snapshot), Xxh3Hex(wide.const_data_ptr(), wide.nbytes()));
  EXPECT_EQ(MakeWeightSnapshot({{"a", at::ones({2}, at::kLong)}}, {}).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(WeightSnapshotTest, MemoryIsUsedAgainOnlyWhenNobodyHoldsIt) {
  const auto first_value = [](const WeightSource& source) {
    float value = 0;
    source.Read(0, absl::MakeSpan(reinterpret_cast<std::byte*>(&value), sizeof(value)));
    return value;
  };
  const auto kept =
      MakeWeightSnapshot({{"a", at::full({8}, 1.0)}}, {.version = 1, .digest = {}}).value();
  for (const double value : {-2.5, 3.25, -4.75}) {
    const at::Tensor tensor = at::full({8}, value, at::kFloat);
    const auto next = MakeWeightSnapshot({{"a", tensor}}, {.version = 2, .digest = {}}).value();
    EXPECT_EQ(DigestOfStream(*next), WeightsDigest({{"a", tensor}}));
    EXPECT_EQ(first_value(*next), value);
    EXPECT_EQ(first_value(*kept), 1.0f);
  }
}

}  // namespace
}  // namespace tandem::training
