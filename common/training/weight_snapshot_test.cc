#include "common/training/weight_snapshot.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "common/tensor/checksum.h"

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

}  // namespace
}  // namespace tandem::training
