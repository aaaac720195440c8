#include "common/ops/linear/head_linear.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>

#include "common/ops/ops.h"

namespace tandem::ops {
namespace {

constexpr int64_t kTokens = 71, kHeads = 3, kKeys = 6, kValues = 5, kLatent = 21;

// The two maps of latent attention: views of one stack of heads, queries that are slices of wider
// ones.
struct Operands {
  at::Tensor queries = at::randn({kTokens, kHeads, kKeys + 4});
  at::Tensor latents = at::randn({kTokens, kHeads, kLatent});
  at::Tensor stack = at::randn({kHeads * (kKeys + kValues), kLatent});

  at::Tensor Part(int64_t begin, int64_t rows) const {
    return stack.view({kHeads, kKeys + kValues, kLatent}).narrow(1, begin, rows);
  }
  at::Tensor Absorbed() const {
    return TransposedHeadLinear(queries.narrow(2, 0, kKeys), Part(0, kKeys));
  }
  at::Tensor Expanded() const { return HeadLinear(latents, Part(kKeys, kValues)); }
};

TEST(HeadLinearTest, EachHeadHasItsOwnMatrix) {
  at::manual_seed(1);
  const Operands x;
  const at::Tensor absorbed =
      at::einsum("thk,hkl->thl",
                 {x.queries.narrow(2, 0, kKeys).to(at::kDouble), x.Part(0, kKeys).to(at::kDouble)});
  const at::Tensor expanded = at::einsum(
      "thl,hvl->thv", {x.latents.to(at::kDouble), x.Part(kKeys, kValues).to(at::kDouble)});
  for (const KernelPath path : {KernelPath::kAuto, KernelPath::kAten}) {
    SetKernelPath(path);
    EXPECT_LE((x.Absorbed() - absorbed).abs().max().item<double>(), 2e-5);
    EXPECT_LE((x.Expanded() - expanded).abs().max().item<double>(), 2e-5);
  }
  SetKernelPath(KernelPath::kAuto);
}

TEST(HeadLinearTest, ARowHasTheSameBitsAloneAndInTraining) {
  at::manual_seed(2);
  Operands x;
  const at::Tensor absorbed = x.Absorbed(), expanded = x.Expanded();
  const c10::InferenceMode guard;
  EXPECT_TRUE(at::equal(absorbed, x.Absorbed()));
  EXPECT_TRUE(at::equal(expanded, x.Expanded()));
  x.queries = x.queries.narrow(0, 40, 1);
  x.latents = x.latents.narrow(0, 40, 1);
  EXPECT_TRUE(at::equal(absorbed.narrow(0, 40, 1), x.Absorbed()));
  EXPECT_TRUE(at::equal(expanded.narrow(0, 40, 1), x.Expanded()));
  x.latents = x.latents.flatten(1);
  EXPECT_TRUE(at::equal(expanded.narrow(0, 40, 1).flatten(1), x.Expanded()));
}

TEST(HeadLinearTest, GradientsAreThoseOfAten) {
  at::manual_seed(3);
  Operands x;
  const auto gradients = [&](KernelPath path) {
    SetKernelPath(path);
    std::vector<at::Tensor> leaves;
    for (at::Tensor* leaf : {&x.queries, &x.latents, &x.stack}) {
      *leaf = leaf->detach().clone().requires_grad_();
      leaves.push_back(*leaf);
    }
    const at::Tensor flat = HeadLinear(x.latents.flatten(1), x.Part(kKeys, kValues));
    (x.Absorbed().square().sum() + x.Expanded().sin().sum() + flat.cos().sum()).backward();
    SetKernelPath(KernelPath::kAuto);
    for (at::Tensor& leaf : leaves) leaf = leaf.grad();
    return leaves;
  };
  const auto mine = gradients(KernelPath::kAuto), aten = gradients(KernelPath::kAten);
  for (size_t i = 0; i < mine.size(); ++i) {
    const double scale = aten[i].abs().max().item<double>();
    EXPECT_GT(scale, 0) << i;
    EXPECT_LE((mine[i] - aten[i]).abs().max().item<double>(), 1e-5 * scale) << i;
  }
  at::set_num_threads(1);
  const auto alone = gradients(KernelPath::kAuto);
  at::set_num_threads(2);
  for (size_t i = 0; i < mine.size(); ++i) EXPECT_TRUE(at::equal(mine[i], alone[i])) << i;
}

}  // namespace
}  // namespace tandem::ops
