#include "common/tensor/safetensors/safetensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "common/tensor/testing/write_safetensors.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;
using testing::AllOf;
using testing::HasSubstr;

class SafetensorsTest : public testing::Test {
 protected:
  SafetensorsTest() {
    directory_ = fs::path(testing::TempDir()) /
                 testing::UnitTest::GetInstance()->current_test_info()->name();
    fs::remove_all(directory_);
    fs::create_directories(directory_);
  }

  std::string Path(const std::string& name) const { return directory_ / name; }

  // A file with this header and `data_bytes` bytes of data; the length field may lie.
  std::string WriteRaw(const std::string& header, size_t data_bytes, int64_t length = -1,
                       const std::string& name = "model.safetensors") {
    const uint64_t stated = length < 0 ? header.size() : static_cast<uint64_t>(length);
    std::ofstream file(Path(name), std::ios::binary);
    for (int i = 0; i < 8; ++i) file.put(static_cast<char>(stated >> (8 * i)));
    file << header << std::string(data_bytes, 'x');
    return Path(name);
  }

  absl::Status OpenRaw(const std::string& header, size_t data_bytes, int64_t length = -1) {
    return SafetensorsFile::Open(WriteRaw(header, data_bytes, length)).status();
  }

  static void ExpectError(const absl::Status& status, absl::StatusCode code,
                          const std::string& what) {
    EXPECT_EQ(status.code(), code) << status;
    EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr("safetensors"), HasSubstr(what)));
  }
  static void ExpectInvalid(const absl::Status& status, const std::string& what) {
    ExpectError(status, absl::StatusCode::kInvalidArgument, what);
  }

  fs::path directory_;
};

constexpr char kGood[] = R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})";

TEST_F(SafetensorsTest, ReadsWhatItWrote) {
  const float a[] = {1, 2, 3};
  const uint8_t b[] = {7};
  const std::vector<TensorView> views = {
      {"b", DType::kUInt8, {}, reinterpret_cast<const std::byte*>(b), 1, ""},
      {"a", DType::kFloat32, {3, 1}, reinterpret_cast<const std::byte*>(a), 12, ""}};
  ASSERT_TRUE(WriteSafetensors(Path("x.safetensors"), views, {{"format", "pt"}}).ok());
  const auto file = SafetensorsFile::Open(Path("x.safetensors"));
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ((*file)->metadata().at("format"), "pt");
  const TensorView* found = (*file)->Find("a");
  ASSERT_NE(found, nullptr);
  EXPECT_EQ(found->shape, (std::vector<int64_t>{3, 1}));
  EXPECT_EQ(std::memcmp(found->data, a, 12), 0);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(found->data) % 4, 0u);
  EXPECT_EQ((*file)->Find("c"), nullptr);
  EXPECT_EQ(std::distance(fs::directory_iterator(directory_), fs::directory_iterator()), 1)
      << "the temporary file is gone";
}

TEST_F(SafetensorsTest, MissingFileIsNotFound) {
  ExpectError(SafetensorsFile::Open(Path("no.safetensors")).status(), absl::StatusCode::kNotFound,
              "no.safetensors");
}

TEST_F(SafetensorsTest, TruncatedFilesAreDataLoss) {
  std::ofstream(Path("short.safetensors")) << "abc";
  ExpectError(SafetensorsFile::Open(Path("short.safetensors")).status(),
              absl::StatusCode::kDataLoss, "truncated");
  ExpectError(OpenRaw(kGood, 8, 1000), absl::StatusCode::kDataLoss, "header length 1000");
  ExpectError(OpenRaw(kGood, 7), absl::StatusCode::kDataLoss, "tensor 'a': truncated");
}

TEST_F(SafetensorsTest, HeaderLengthBombIsRefused) {
  ExpectInvalid(OpenRaw(kGood, 8, int64_t{1} << 40), "exceeds the limit");
}

TEST_F(SafetensorsTest, AFileThatGitLfsHasNotDownloadedIsNamedAsSuch) {
  std::ofstream(Path("model.safetensors"))
      << "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 2471645608\n";
  ExpectInvalid(SafetensorsDirectory::Open(directory_).status(), "git lfs pull");
  fs::remove(Path("model.safetensors"));
  std::ofstream(Path("model.safetensors.index.json"))
      << "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 24716\n";
  ExpectInvalid(SafetensorsDirectory::Open(directory_).status(), "git lfs pull");
}

TEST_F(SafetensorsTest, BrokenJsonIsRefused) {
  ExpectInvalid(OpenRaw(R"({"a":)", 8), "not valid JSON");
  ExpectInvalid(OpenRaw("", 8), "not valid JSON");
  ExpectInvalid(OpenRaw("[1]", 8), "array");
  ExpectInvalid(OpenRaw("{\"a\":{\"dtype\":\"\xff\"}}", 8), "not valid JSON");
}

TEST_F(SafetensorsTest, NestingBombIsRefusedAtOnce) {
  ExpectInvalid(OpenRaw(std::string(1'000'000, '['), 0), "array");
  ExpectInvalid(OpenRaw(R"({"a":{"shape":)" + std::string(1'000'000, '['), 0), "tensor 'a'");
  std::string objects;
  for (int i = 0; i < 100'000; ++i) objects += R"({"a":)";
  ExpectInvalid(OpenRaw(objects, 0), "tensor 'a'");
}

TEST_F(SafetensorsTest, DuplicateNamesAreRefused) {
  ExpectInvalid(OpenRaw(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
                        R"("a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})",
                        2),
                "tensor 'a': appears twice");
  ExpectInvalid(OpenRaw(R"({"a":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}})", 1),
                "key 'dtype' appears twice");
}

TEST_F(SafetensorsTest, OverlapsAndHolesAreRefused) {
  ExpectInvalid(OpenRaw(R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},)"
                        R"("b":{"dtype":"U8","shape":[4],"data_offsets":[2,6]}})",
                        6),
                "tensor 'b': data starts at byte 2, inside");
  ExpectInvalid(OpenRaw(R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},)"
                        R"("b":{"dtype":"U8","shape":[4],"data_offsets":[5,9]}})",
                        9),
                "tensor 'b': data starts at byte 5, with a hole");
  ExpectInvalid(OpenRaw(kGood, 9), "1 bytes after the last tensor");
}

TEST_F(SafetensorsTest, BadShapesAreRefused) {
  ExpectInvalid(OpenRaw(R"({"a":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}})", 8),
                "tensor 'a': shape and dtype need 12 bytes, data_offsets give 8");
  ExpectInvalid(OpenRaw(R"({"a":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}})", 8),
                "tensor 'a': a negative number at 'shape'");
  ExpectInvalid(OpenRaw(R"({"a":{"dtype":"F32","shape":[4294967296,4294967296],)"
                        R"("data_offsets":[0,8]}})",
                        8),
                "tensor 'a': shape overflows");
  ExpectInvalid(OpenRaw(R"({"a":{"dtype":"F32","shape":[18446744073709551615],)"
                        R"("data_offsets":[0,8]}})",
                        8),
                "tensor 'a': shape overflows");
  ExpectInvalid(OpenRaw(R"({"a":{"dtype":"F32","shape":[2.0],"data_offsets":[0,8]}})", 8),
                "not an integer");
  ExpectInvalid(OpenRaw(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}})", 8),
                "run backwards");
}

TEST_F(SafetensorsTest, IncompleteOrForeignEntriesAreRefused) {
  ExpectInvalid(OpenRaw(R"({"a":{"dtype":"F4","shape":[2],"data_offsets":[0,8]}})", 8),
                "tensor 'a': unknown dtype 'F4'");
  ExpectInvalid(OpenRaw(R"({"a":{"dtype":"F32","data_offsets":[0,8]}})", 8),
                "tensor 'a': needs dtype, shape and data_offsets");
  ExpectInvalid(OpenRaw(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[8]}})", 8),
                "tensor 'a': data_offsets must hold two numbers");
  ExpectInvalid(OpenRaw(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8],"x":1}})", 8),
                "tensor 'a': unknown key 'x'");
  ExpectInvalid(OpenRaw(R"({"a":7})", 8), "at 'a'");
}

TEST_F(SafetensorsTest, ShardsAreJoinedByTheirIndex) {
  WriteRaw(R"({"b":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})", 1, -1, "1.safetensors");
  WriteRaw(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})", 1, -1, "2.safetensors");
  const auto index = [&](const std::string& map) {
    std::ofstream(Path("model.safetensors.index.json")) << R"({"weight_map":)" << map << "}";
    return SafetensorsDirectory::Open(directory_);
  };
  const auto good = index(R"({"a":"2.safetensors","b":"1.safetensors"})");
  ASSERT_TRUE(good.ok()) << good.status();
  ASSERT_EQ((*good)->tensors().size(), 2u);
  EXPECT_EQ((*good)->tensors()[0].name, "a");
  EXPECT_EQ((*good)->Find("b")->file, Path("1.safetensors"));
  EXPECT_EQ((*good)->Find("c"), nullptr);

  ExpectInvalid(index(R"({"a":"2.safetensors","b":"1.safetensors","c":"1.safetensors"})").status(),
                "1.safetensors: tensor 'c': missing");
  ExpectInvalid(index(R"({"a":"2.safetensors","c":"1.safetensors"})").status(),
                "1.safetensors: tensor 'b': not in");
  ExpectError(index(R"({"a":"3.safetensors"})").status(), absl::StatusCode::kNotFound,
              "3.safetensors: missing shard");
  for (const std::string outside : {"../2.safetensors", "/etc/passwd", "..", "", "a/b"}) {
    ExpectInvalid(index(absl::StrCat(R"({"a":")", outside, R"("})")).status(),
                  "tensor 'a': the shard must be a file name inside");
  }
  ExpectInvalid(index(R"({"a":"2.safetensors","a":"1.safetensors"})").status(),
                "key 'a' appears twice");
  ExpectInvalid(index("[]").status(), "weight_map");
  ExpectInvalid(index(std::string(100'000, '[')).status(), "nested deeper");
}

TEST_F(SafetensorsTest, EmptyDirectoryIsNotFound) {
  EXPECT_EQ(SafetensorsDirectory::Open(directory_).status().code(), absl::StatusCode::kNotFound);
}

}  // namespace
}  // namespace tandem
