#include "common/weights/weight_snapshot.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "common/weights/testing/stream_digest.h"
#include "common/weights/weights_digest.h"

namespace tandem {
namespace {

WeightsVersion VersionOf(int64_t version, const NamedTensors& tensors) {
  return {.version = version, .digest = WeightsDigest(tensors)};
}

absl::StatusOr<std::shared_ptr<const WeightSource>> Snapshot(const NamedTensors& tensors,
                                                             const WeightsVersion& weights = {}) {
  std::vector<WeightSpec> specs;
  for (const auto& [name, tensor] : tensors) {
    specs.push_back({.name = name, .shape = tensor.sizes().vec()});
  }
  return MakeWeightSnapshot(ManifestOf(specs, weights, /*num_token_ids=*/7), SourceOf(tensors));
}

std::string DigestOfStream(const WeightSource& source) {
  std::vector<std::byte> stream(static_cast<size_t>(source.manifest().total_bytes));
  EXPECT_TRUE(source.Read(0, absl::MakeSpan(stream)).ok());
  return StreamDigest(source.manifest().tensors, stream);
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
  const auto snapshot = Snapshot(tensors, VersionOf(4, tensors)).value();
  at::Tensor(tensors[0].second).zero_();
  const WeightManifest& manifest = snapshot->manifest();
  EXPECT_EQ(manifest.version, 4);
  EXPECT_EQ(manifest.total_bytes, static_cast<int64_t>(stream.size()));
  EXPECT_EQ(manifest.digest, StreamDigest(manifest.tensors, stream));
  EXPECT_EQ(manifest.tensors[0].shape, std::vector<int64_t>({2, 3}));
  for (size_t begin = 0; begin < stream.size(); ++begin) {
    for (size_t end = begin + 1; end <= stream.size(); ++end) {
      std::vector<std::byte> part(end - begin);
      ASSERT_TRUE(snapshot->Read(static_cast<int64_t>(begin), absl::MakeSpan(part)).ok());
      ASSERT_EQ(std::memcmp(part.data(), stream.data() + begin, part.size()), 0);
    }
  }
}

TEST(WeightSnapshotTest, HalfPrecisionIsWidenedAndIntegersAreRefused) {
  const at::Tensor half = at::full({3}, 1.5).to(at::kBFloat16);
  const auto snapshot = Snapshot({{"a", half}}, VersionOf(1, {{"a", half}})).value();
  const at::Tensor wide = half.to(at::kFloat);
  EXPECT_EQ(snapshot->manifest().tensors[0].dtype, DType::kFloat32);
  EXPECT_EQ(snapshot->manifest().digest, WeightsDigest({{"a", wide}}));
  EXPECT_EQ(snapshot->manifest().digest, DigestOfStream(*snapshot));
  EXPECT_EQ(Snapshot({{"a", at::ones({2}, at::kLong)}}, {}).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(WeightSnapshotTest, EveryTypeThatAReceiverWantsIsThereOnce) {
  const std::vector<WeightSpec> tensors = {{.name = "a", .shape = {2}},
                                           {.name = "b", .shape = {3}}};
  const TensorTypes narrow = {{"a", DType::kBFloat16}, {"other", DType::kBFloat16}};
  EXPECT_EQ(InWantedTypes(tensors, {}), tensors);
  EXPECT_EQ(InWantedTypes(tensors, {{}}), tensors);
  const WeightSpec rounded = {.name = "a", .dtype = DType::kBFloat16, .shape = {2}};
  EXPECT_EQ(InWantedTypes(tensors, {narrow}), (std::vector<WeightSpec>{rounded, tensors[1]}));
  EXPECT_EQ(InWantedTypes(tensors, {narrow, {}, narrow}),
            (std::vector<WeightSpec>{tensors[0], rounded, tensors[1]}));
}

// More values than are converted at a time, and an odd number of them.
TEST(WeightSnapshotTest, ATensorIsKeptInSeveralTypesWithTheSumsOfEach) {
  at::Tensor values = at::randn({(2 << 20) + 1'001});
  // Ties, the largest value that is not rounded to infinity, and values without a leading 1.
  const std::vector<float> special = {1.00390625f, 1.01171875f, -3.3895e38f, 1e-40f, 0.0f, -0.0f};
  std::copy(special.begin(), special.end(), values.mutable_data_ptr<float>());
  const at::Tensor norm = at::randn({5});
  const auto count = values.numel();
  const std::vector<WeightSpec> specs = {{.name = "a", .shape = {count}},
                                         {.name = "a", .dtype = DType::kBFloat16, .shape = {count}},
                                         {.name = "b", .shape = {5}}};
  const NamedTensors given = {{"a", values}, {"b", norm}};
  const auto snapshot =
      MakeWeightSnapshot(ManifestOf(specs, VersionOf(1, given), 7), SourceOf(given)).value();
  EXPECT_EQ(snapshot->manifest().tensors, specs);
  EXPECT_EQ(snapshot->manifest().total_bytes, count * 6 + 20);
  EXPECT_EQ(snapshot->manifest().float32_bytes(), count * 4 + 20);
  const std::vector<at::Tensor> forms = {values, values.to(at::kBFloat16), norm};
  int64_t offset = 0;
  ASSERT_EQ(snapshot->sums().size(), specs.size());
  for (size_t i = 0; i < specs.size(); ++i) {
    std::vector<std::byte> bytes(static_cast<size_t>(specs[i].bytes()));
    ASSERT_TRUE(snapshot->Read(offset, absl::MakeSpan(bytes)).ok());
    EXPECT_EQ(std::memcmp(bytes.data(), forms[i].const_data_ptr(), bytes.size()), 0) << i;
    EXPECT_EQ(snapshot->sums()[i], SumBytes(0, bytes.data(), specs[i].bytes())) << i;
    offset += specs[i].bytes();
  }
  EXPECT_TRUE(Snapshot(given).value()->sums().empty()) << "the digest says it all";
}

TEST(WeightSnapshotTest, RoundedWeightsMustHaveTheDigestOfTheirVersion) {
  const NamedTensors given = {{"a", at::ones({3})}}, others = {{"a", at::full({3}, 2.0)}};
  const std::vector<WeightSpec> specs = {{.name = "a", .dtype = DType::kBFloat16, .shape = {3}}};
  EXPECT_TRUE(MakeWeightSnapshot(ManifestOf(specs, VersionOf(1, given), 7), SourceOf(given)).ok());
  EXPECT_EQ(MakeWeightSnapshot(ManifestOf(specs, VersionOf(1, given), 7), SourceOf(others))
                .status()
                .code(),
            absl::StatusCode::kDataLoss);
}

TEST(WeightSnapshotTest, AFileIsUsedAgainOnlyWhenNobodyHoldsIt) {
  const auto first_value = [](const WeightSource& source) {
    float value = 0;
    const auto bytes = absl::MakeSpan(reinterpret_cast<std::byte*>(&value), sizeof(value));
    EXPECT_TRUE(source.Read(0, bytes).ok());
    return value;
  };
  const auto kept = Snapshot({{"a", at::full({8}, 1.0)}}, {.version = 1, .digest = {}}).value();
  for (const double value : {-2.5, 3.25, -4.75}) {
    const at::Tensor tensor = at::full({8}, value, at::kFloat);
    const auto next = Snapshot({{"a", tensor}}, {.version = 2, .digest = {}}).value();
    EXPECT_EQ(DigestOfStream(*next), WeightsDigest({{"a", tensor}}));
    EXPECT_EQ(first_value(*next), value);
    EXPECT_EQ(first_value(*kept), 1.0f);
  }
}

// Returns device and inode of this process's open files that have no name.
std::vector<std::string> UnnamedFiles() {
  std::vector<std::string> files;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    const std::string target = std::filesystem::read_symlink(entry.path(), gone).string();
    if (absl::EndsWith(target, " (deleted)")) files.push_back(target);
  }
  return files;
}

TEST(WeightSnapshotTest, TheFileOfTheLastOneIsUsedAgain) {
  const NamedTensors tensors = {{"a", at::ones({100})}};
  EXPECT_TRUE(Snapshot(tensors).ok());
  const std::vector<std::string> before = UnnamedFiles();
  ASSERT_EQ(before.size(), 1u);
  {
    const auto first = Snapshot(tensors).value();
    EXPECT_EQ(UnnamedFiles(), before);
    const auto second = Snapshot(tensors).value();
    EXPECT_EQ(UnnamedFiles().size(), 2u);
  }
  EXPECT_EQ(UnnamedFiles().size(), 1u);
  EXPECT_TRUE(Snapshot({{"a", at::ones({101})}}).ok());
  EXPECT_EQ(UnnamedFiles().size(), 1u);
}

TEST(WeightSnapshotTest, OtherTensorsThanExpectedAreNamed) {
  const NamedTensors given = {{"a", at::ones({2})}, {"b", at::ones({3})}};
  const auto message = [&](const std::vector<WeightSpec>& expected) {
    const absl::Status status =
        MakeWeightSnapshot(ManifestOf(expected, {}, 7), SourceOf(given)).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    return std::string(status.message());
  };
  const WeightSpec a = {.name = "a", .shape = {2}}, b = {.name = "b", .shape = {3}};
  EXPECT_EQ(message({b, a}), "tensor 'a' is not the expected one");
  EXPECT_EQ(message({a, {.name = "b", .shape = {4}}}), "tensor 'b' is not the expected one");
  EXPECT_EQ(message({a}), "tensor 'b' is not the expected one");
  EXPECT_EQ(message({a, b, {.name = "c", .shape = {}}}), "tensor 'c' was not given");
}

TEST(WeightSnapshotTest, AnErrorOfTheSourceIsReturned) {
  const auto failing = [](TensorVisitor) { return absl::UnavailableError("a rank is lost"); };
  EXPECT_EQ(MakeWeightSnapshot(ManifestOf({}, {}, 7), failing).status(),
            absl::UnavailableError("a rank is lost"));
}

// More bytes than any disk has.
TEST(WeightSnapshotTest, WithoutSpaceNothingIsCopied) {
  const std::vector<WeightSpec> specs = {{.name = "a", .shape = {int64_t{1} << 40}}};
  const absl::Status status = MakeWeightSnapshot(ManifestOf(specs, {}, 7), [](TensorVisitor) {
                                return absl::InternalError("was asked");
                              }).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  EXPECT_THAT(std::string(status.message()),
              testing::AllOf(testing::HasSubstr("4398046511104 bytes"),
                             testing::HasSubstr(std::filesystem::temp_directory_path().string())));
}

TEST(WeightSnapshotTest, WithoutADirectoryForTemporaryFilesTheErrorSaysSo) {
  EXPECT_TRUE(Snapshot({{"a", at::ones({7})}}).ok());
  const char* const before = ::getenv("TMPDIR");
  const std::string saved = before == nullptr ? "" : before;
  ::setenv("TMPDIR", "/nowhere", 1);
  const absl::Status status = Snapshot({{"a", at::ones({8})}}).status();
  before == nullptr ? ::unsetenv("TMPDIR") : ::setenv("TMPDIR", saved.c_str(), 1);
  EXPECT_FALSE(status.ok());
  EXPECT_THAT(std::string(status.message()), testing::HasSubstr("temporary files"));
}

}  // namespace
}  // namespace tandem
