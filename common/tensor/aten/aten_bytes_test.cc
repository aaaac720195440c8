#include "common/tensor/aten/aten_bytes.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "common/tensor/testing/read_named_tensors.h"

namespace tandem {
namespace {

TEST(AtenBytesTest, EveryTypeSurvivesAFile) {
  NamedTensors tensors;
  int index = 0;
  for (const at::ScalarType type : {at::kDouble, at::kFloat, at::kBFloat16, at::kHalf, at::kLong,
                                    at::kInt, at::kShort, at::kChar, at::kByte, at::kBool}) {
    tensors.emplace_back(absl::StrCat("t", index++),
                         at::arange(6, at::TensorOptions(at::kLong)).reshape({2, 3}).to(type));
  }
  tensors.emplace_back("scalar", at::scalar_tensor(2.5));
  tensors.emplace_back("empty", at::empty({0, 4}));
  tensors.emplace_back("transposed", at::arange(6, at::TensorOptions(at::kFloat)).view({2, 3}).t());
  const std::string path = testing::TempDir() + "/every_type.safetensors";
  ASSERT_TRUE(WriteNamedTensors(path, tensors).ok());
  const auto read = ReadNamedTensors(path);
  ASSERT_TRUE(read.ok()) << read.status();
  ASSERT_EQ(read->size(), tensors.size());
  for (const auto& [name, tensor] : tensors) {
    const auto found =
        std::find_if(read->begin(), read->end(),
                     [&wanted = name](const auto& entry) { return entry.first == wanted; });
    ASSERT_NE(found, read->end()) << name;
    EXPECT_EQ(found->second.scalar_type(), tensor.scalar_type());
    EXPECT_TRUE(at::equal(found->second, tensor)) << name;
  }
}

TEST(AtenBytesTest, FloatsCanBeStoredNarrowerAndReadBackWide) {
  const std::string path = testing::TempDir() + "/narrow.safetensors";
  const at::Tensor values = at::tensor({1.0f, 0.5f, 3.1415926f});
  ASSERT_TRUE(
      WriteNamedTensors(path, {{"x", values}, {"step", at::tensor({int64_t{7}})}}, DType::kBFloat16)
          .ok());
  const auto file = SafetensorsFile::Open(path);
  ASSERT_TRUE(file.ok());
  EXPECT_EQ((*file)->Find("x")->dtype, DType::kBFloat16);
  EXPECT_EQ((*file)->Find("step")->dtype, DType::kInt64);
  at::Tensor wide = at::zeros({3});
  wide.copy_(AliasAsAten(*(*file)->Find("x")));
  EXPECT_TRUE(at::equal(wide, values.to(at::kBFloat16).to(at::kFloat)));
}

}  // namespace
}  // namespace tandem
