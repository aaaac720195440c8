#include "common/weights/weights_digest.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <vector>

namespace tandem {
namespace {

TEST(WeightsDigestTest, ValuesAreHashedAsFloat32InOrder) {
  const NamedTensors tensors = {{"a", at::arange(6, at::kFloat).view({2, 3}).t()},
                                {"b", at::full({4}, 1.5).to(at::kBFloat16)},
                                {"c", at::full({}, -2.0)}};
  const at::Tensor values =
      at::cat({tensors[0].second.flatten(), at::full({4}, 1.5), at::full({1}, -2.0)});
  WeightsHasher hasher;
  hasher.Add(values.to(at::kFloat));
  EXPECT_EQ(WeightsDigest(tensors), hasher.Hex());
}

TEST(WeightsDigestTest, WhatIsOnTheHostIsNotCopied) {
  const NamedTensors tensors = {{"a", at::arange(6, at::kFloat)}, {"b", at::ones({2})}};
  std::vector<const void*> seen;
  const absl::Status visited = VisitOnHost(SourceOf(tensors), [&](const at::Tensor& values) {
    seen.push_back(values.const_data_ptr());
    return absl::OkStatus();
  });
  EXPECT_TRUE(visited.ok()) << visited;
  EXPECT_EQ(seen, (std::vector<const void*>{tensors[0].second.const_data_ptr(),
                                            tensors[1].second.const_data_ptr()}));
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
  const NamedTensors tensors = {{"a", at::ones({2})}, {"b", at::ones({2})}};
  int visits = 0;
  EXPECT_EQ(VisitOnHost(SourceOf(tensors),
                        [&](const at::Tensor&) {
                          ++visits;
                          return lost;
                        }),
            lost);
  EXPECT_EQ(visits, 1);
}

}  // namespace
}  // namespace tandem
