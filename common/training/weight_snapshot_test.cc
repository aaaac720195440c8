#include "common/training/weight_snapshot.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "common/tensor/checksum.h"
#include "common/tensor/weights_digest.h"

namespace tandem::training {
namespace {

TEST(WeightSnapshotTest, ReadsAnyRangeOfTheStreamAndIsACopy) {
  const NamedTensors tensors = {{"a", at::arange(6, at::kFloat).view({2, 3})},
                                {"b", at::full({1}, 7.0)},
                                {"c", at::arange(5, at::kFloat)}};
  std::vector<std::byte> stream;
  for (const auto& [name, tensor] : tensors) {
    const auto* bytes = static_cast<const std::byte*>(tensor.const_data_ptr());
    stream.insert(stream.end(), bytes, bytes + tensor.nbytes());
  }
  const auto snapshot = MakeWeightSnapshot(tensors, 4).value();
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
  const auto snapshot = MakeWeightSnapshot({{"a", half}}, 1).value();
  const at::Tensor wide = half.to(at::kFloat);
  EXPECT_EQ(snapshot->manifest().tensors[0].dtype, DType::kFloat32);
  EXPECT_EQ(snapshot->manifest().digest, WeightsDigest({{"a", wide}}));
  EXPECT_EQ(snapshot->manifest().digest, Xxh3Hex(wide.const_data_ptr(), wide.nbytes()));
  EXPECT_EQ(MakeWeightSnapshot({{"a", at::ones({2}, at::kLong)}}, 1).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(WeightSnapshotTest, MemoryIsUsedAgainOnlyWhenNobodyHoldsIt) {
  const auto first_value = [](const WeightSource& source) {
    float value = 0;
    source.Read(0, absl::MakeSpan(reinterpret_cast<std::byte*>(&value), sizeof(value)));
    return value;
  };
  const auto kept = MakeWeightSnapshot({{"a", at::full({8}, 1.0)}}, 1).value();
  for (const double value : {-2.5, 3.25, -4.75}) {
    const at::Tensor tensor = at::full({8}, value, at::kFloat);
    const auto next = MakeWeightSnapshot({{"a", tensor}}, 2).value();
    EXPECT_EQ(next->manifest().digest, WeightsDigest({{"a", tensor}}));
    EXPECT_EQ(first_value(*next), value);
    EXPECT_EQ(first_value(*kept), 1.0f);
  }
}

}  // namespace
}  // namespace tandem::training
