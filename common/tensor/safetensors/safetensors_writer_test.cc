#include "common/tensor/safetensors/safetensors_writer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <string>
#include <vector>

#include "common/base/files/atomic_file.h"
#include "common/tensor/testing/write_safetensors.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

TensorView View(const std::string& name, const std::vector<float>& values) {
  return {name,
          DType::kFloat32,
          {static_cast<int64_t>(values.size())},
          reinterpret_cast<const std::byte*>(values.data()),
          values.size() * sizeof(float),
          ""};
}

class SafetensorsWriterTest : public testing::Test {
 protected:
  SafetensorsWriterTest() {
    directory_ = fs::path(testing::TempDir()) /
                 testing::UnitTest::GetInstance()->current_test_info()->name();
    fs::remove_all(directory_);
    fs::create_directories(directory_);
  }
  ~SafetensorsWriterTest() override { fs::remove_all(directory_); }

  std::string Path(const std::string& name) const { return directory_ / name; }
  int64_t Files() const { return std::distance(fs::directory_iterator(directory_), {}); }
  std::unique_ptr<SafetensorsWriter> Create(const std::vector<WeightSpec>& specs) const {
    return SafetensorsWriter::Create(Path("x.safetensors"), specs).value();
  }
  static void ExpectInvalid(const absl::Status& status, const std::string& what) {
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("x.safetensors: tensor '" + what));
  }

  fs::path directory_;
  const std::vector<float> a_ = {1, 2, 3}, b_ = {4, 5};
  const std::vector<WeightSpec> specs_ = {{"a", DType::kFloat32, {3}}, {"b", DType::kFloat32, {2}}};
};

TEST_F(SafetensorsWriterTest, AnyOrderOfTensorsGivesTheSameFile) {
  const uint8_t byte = 7;
  const TensorView c = {"c", DType::kUInt8, {}, reinterpret_cast<const std::byte*>(&byte), 1, ""};
  const std::vector<TensorView> tensors = {c, View("a", a_), View("b", b_)};
  const std::map<std::string, std::string> metadata = {{"format", "pt"}};
  ASSERT_TRUE(WriteSafetensors(Path("whole.safetensors"), tensors, metadata).ok());
  std::vector<WeightSpec> specs = specs_;
  specs.insert(specs.begin(), {"c", DType::kUInt8, {}});
  for (const std::vector<size_t>& order :
       std::vector<std::vector<size_t>>{{0, 1, 2}, {2, 1, 0}, {1, 0, 2}}) {
    const auto writer = SafetensorsWriter::Create(Path("x.safetensors"), specs, metadata).value();
    for (const size_t i : order) ASSERT_TRUE(writer->Write(tensors[i]).ok());
    ASSERT_TRUE(writer->Finish().ok());
    EXPECT_EQ(ReadFile(Path("x.safetensors")).value(), ReadFile(Path("whole.safetensors")).value());
  }
  EXPECT_EQ(Files(), 2);
}

TEST_F(SafetensorsWriterTest, WhatIsNotFinishedLeavesTheOldFile) {
  ASSERT_TRUE(WriteFileDurably(Path("x.safetensors"), "old").ok());
  {
    const auto writer = Create(specs_);
    ASSERT_TRUE(writer->Write(View("a", a_)).ok());
    EXPECT_EQ(Files(), 2);
    ExpectInvalid(writer->Finish(), "b': was not given");
  }
  EXPECT_EQ(Files(), 1);
  EXPECT_EQ(ReadFile(Path("x.safetensors")).value(), "old");
}

TEST_F(SafetensorsWriterTest, WhatDoesNotFitIsNamed) {
  const auto writer = Create(specs_);
  ASSERT_TRUE(writer->Write(View("a", a_)).ok());
  ExpectInvalid(writer->Write(View("a", a_)), "a': is given twice");
  ExpectInvalid(writer->Write(View("c", a_)), "c': the file has no such tensor");
  ExpectInvalid(writer->Write(View("b", a_)), "b': is F32 [3], expected F32 [2]");
  TensorView other = View("b", b_);
  other.dtype = DType::kInt32;
  ExpectInvalid(writer->Write(other), "b': is I32 [2], expected F32 [2]");
  TensorView shorter = View("b", b_);
  shorter.bytes = 4;
  ExpectInvalid(writer->Write(shorter), "b': shape and dtype need 8 bytes, 4 given");
  EXPECT_EQ(writer->Find("b")->shape, std::vector<int64_t>({2}));
  EXPECT_EQ(writer->Find("c"), nullptr);
  ASSERT_TRUE(writer->Write(View("b", b_)).ok());
  EXPECT_TRUE(writer->Finish().ok());
}

TEST_F(SafetensorsWriterTest, TensorsMayComeInPiecesThatAreInterleaved) {
  ASSERT_TRUE(WriteSafetensors(Path("whole.safetensors"), {View("a", a_), View("b", b_)}, {}).ok());
  const auto writer = Create(specs_);
  const auto bytes = [](const std::vector<float>& values, size_t first, size_t count) {
    return absl::MakeConstSpan(reinterpret_cast<const std::byte*>(values.data()),
                               values.size() * sizeof(float))
        .subspan(first, count);
  };
  ExpectInvalid(writer->Append("a", bytes(a_, 0, 4)), "a': bytes are given before");
  ASSERT_TRUE(writer->Begin(specs_[0]).ok());
  ExpectInvalid(writer->Begin(specs_[0]), "a': is given twice");
  ExpectInvalid(writer->Begin({"b", DType::kFloat32, {3}}), "b': is F32 [3], expected F32 [2]");
  ASSERT_TRUE(writer->Begin(specs_[1]).ok());
  ASSERT_TRUE(writer->Append("a", bytes(a_, 0, 5)).ok());
  ASSERT_TRUE(writer->Append("b", bytes(b_, 0, 8)).ok());
  ExpectInvalid(writer->Append("b", bytes(b_, 0, 1)), "b': shape and dtype need 8 bytes, 9 given");
  ExpectInvalid(writer->Finish(), "a': shape and dtype need 12 bytes, 5 given");
  ASSERT_TRUE(writer->Append("a", bytes(a_, 5, 7)).ok());
  ASSERT_TRUE(writer->Finish().ok());
  EXPECT_EQ(ReadFile(Path("x.safetensors")).value(), ReadFile(Path("whole.safetensors")).value());
}

TEST_F(SafetensorsWriterTest, NamesAreGivenOnceAndNotReserved) {
  for (const std::string name : {"a", "__metadata__"}) {
    const std::vector<WeightSpec> specs = {{"a", DType::kFloat32, {2}},
                                           {name, DType::kFloat32, {2}}};
    ExpectInvalid(SafetensorsWriter::Create(Path("x.safetensors"), specs).status(),
                  name + "': appears twice or is reserved");
  }
  EXPECT_EQ(Files(), 0);
}

TEST_F(SafetensorsWriterTest, WhereNothingCanBeWrittenTheErrorIsTheFiles) {
  const absl::Status status = SafetensorsWriter::Create(Path("no/x.safetensors"), specs_).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(status.message()), HasSubstr("no/x.safetensors"));
  fs::create_directories(Path("x.safetensors/folder"));  // the rename fails
  const auto writer = Create(specs_);
  ASSERT_TRUE(writer->Write(View("a", a_)).ok());
  ASSERT_TRUE(writer->Write(View("b", b_)).ok());
  EXPECT_FALSE(writer->Finish().ok());
}

TEST_F(SafetensorsWriterTest, WhatIsTooLargeForTheDiskIsResourceExhausted) {
  if (::access("/dev/full", W_OK) != 0) GTEST_SKIP() << "no /dev/full here";
  // The temporary file beside it is the device that is always full.
  fs::create_symlink("/dev/full", Path("x.safetensors.tmp." + std::to_string(::getpid())));
  EXPECT_EQ(SafetensorsWriter::Create(Path("x.safetensors"), specs_).status().code(),
            absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(Files(), 0);
}

}  // namespace
}  // namespace tandem
