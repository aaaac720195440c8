#include "common/ops/ops.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <tuple>
#include <vector>

#include "common/kernels/cpu/cpu_kernels.h"
#include "common/ops/attention/aten_attention.h"
#include "common/ops/rotary/rotary_growth.h"
#include "common/ops/rotary/rotary_table.h"
#include "common/ops/testing/operations.h"

namespace tandem::ops {
namespace {

// Expects the same bits from fn() with autograd and without.
template <typename Function>
void ExpectTrainingHasTheBitsOfInference(const Function& fn) {
  const at::Tensor training = fn();
  c10::InferenceMode guard;
  EXPECT_TRUE(at::equal(training, fn()));
}

// Expects the gradients of fn(leaves) to be those of ATen, for a random gradient of the result.
template <typename Function>
void ExpectTheGradientsOfAten(const std::vector<at::Tensor>& values, const Function& fn) {
  std::vector<at::Tensor> leaves[2];
  at::Tensor dy;
  for (const KernelPath path : {KernelPath::kAuto, KernelPath::kAten}) {
    SetKernelPath(path);
    std::vector<at::Tensor>& mine = leaves[path == KernelPath::kAten];
    for (const at::Tensor& value : values) mine.push_back(value.clone().requires_grad_());
    const at::Tensor y = fn(mine);
    if (!dy.defined()) dy = at::randn(y.sizes());
    y.backward(dy);
  }
  SetKernelPath(KernelPath::kAuto);
  for (size_t i = 0; i < values.size(); ++i) {
    const double scale = std::max(1.0, leaves[1][i].grad().abs().max().item<double>());
    const at::Tensor difference = leaves[0][i].grad() - leaves[1][i].grad();
    EXPECT_LE(difference.abs().max().item<double>(), 1e-5 * scale) << i;
  }
}

// The block table of sequences in these blocks.
at::Tensor BlockTable(const std::vector<std::vector<int32_t>>& blocks) {
  size_t longest = 0;
  for (const auto& row : blocks) longest = std::max(longest, row.size());
  at::Tensor table =
      at::zeros({static_cast<int64_t>(blocks.size()), static_cast<int64_t>(longest)}, at::kInt);
  for (size_t s = 0; s < blocks.size(); ++s) {
    std::copy(blocks[s].begin(), blocks[s].end(),
              table.select(0, static_cast<int64_t>(s)).mutable_data_ptr<int32_t>());
  }
  return table;
}

// Returns the sequences of a pass, on `device`.
PagedSequences Planned(const std::vector<int64_t>& offsets, const std::vector<int64_t>& starts,
                       const at::Tensor& table, at::Device device = at::kCPU) {
  return {.starts = starts,
          .block_table = table.to(device),
          .rows = PlanPagedRows(offsets, starts, table, kernels::kAttentionBlock, device)};
}

// Shorter than the sequences of these tests, with and without whole blocks, and longer.
constexpr int64_t kWindows[] = {1, 5, 64, 70, kNoWindow};

class OpsTest : public testing::Test {
 protected:
  OpsTest() { at::manual_seed(1); }
};

TEST_F(OpsTest, TrainingHasTheBitsOfInference) {
  const at::Tensor x = at::randn({37, 50}), w = at::randn({71, 50}), residual = at::randn({37, 71});
  ExpectTrainingHasTheBitsOfInference([&] { return Linear(x, w); });
  ExpectTrainingHasTheBitsOfInference([&] { return LinearAdd(residual.clone(), x, w); });
  const at::Tensor fused = at::randn({9, 100});  // views of a fused projection
  const at::Tensor heads = fused.narrow(1, 10, 60).view({9, 5, 12}), weight = at::randn({12});
  ExpectTrainingHasTheBitsOfInference([&] { return RmsNorm(heads, weight, 1e-5); });
  ExpectTrainingHasTheBitsOfInference([&] { return RmsNorm(fused, at::ones({100}), 1e-5); });
  const at::Tensor cos = at::randn({9, 6}), sin = at::randn({9, 6});
  ExpectTrainingHasTheBitsOfInference([&] { return RotaryEmbedding(heads, cos, sin); });
  const at::Tensor some_cos = at::randn({9, 4}), some_sin = at::randn({9, 4});
  ExpectTrainingHasTheBitsOfInference([&] { return RotaryEmbedding(heads, some_cos, some_sin); });
  ExpectTrainingHasTheBitsOfInference([&] { return RmsNorm(fused, at::ones({100}), 1e-5, 1.0); });
  ExpectTrainingHasTheBitsOfInference([&] { return SwiGlu(fused.narrow(1, 10, 66)); });
  ExpectTrainingHasTheBitsOfInference(
      [&] { return Gated(fused.narrow(1, 10, 66), GateActivation::kGeluTanh); });
  ExpectTrainingHasTheBitsOfInference([&] { return SwiGlu(fused.t().contiguous().t()); });
  const at::Tensor q = at::randn({100, 6, 10}), k = at::randn({100, 2, 10});
  for (const int64_t window : kWindows) {
    ExpectTrainingHasTheBitsOfInference([&] {
      return CausalAttention(q, k, at::sin(k), {0, 1, 1, 77, 100}, {.window = window});
    });
  }
  ExpectTrainingHasTheBitsOfInference([&] {
    return CausalAttention(q, k, at::sin(k), {0, 1, 1, 77, 100}, {.soft_cap = 1.5});
  });
  // Columns of logits, as those of token ids.
  ExpectTrainingHasTheBitsOfInference([&] { return SoftCap(x.narrow(1, 0, 41).clone(), 2.5); });
}

// A pass after the second reads no block before its window: the table has another one's there.
TEST_F(OpsTest, CachedAttentionEqualsCausalAttentionBitForBit) {
  c10::InferenceMode guard;
  const int64_t length = 190;
  const at::Tensor q = at::randn({length, 6, 16}), k = at::randn({length, 3, 16});
  const at::Tensor v = at::randn({length, 3, 16});
  for (const int64_t window : kWindows) {
    AttentionScores scores = {.window = window, .scale = 0.7};
    if (window == 70 || window == kNoWindow) scores.soft_cap = 2;
    const at::Tensor whole = CausalAttention(q, k, v, {0, length}, scores);
    at::Tensor keys = at::full({4, 3, 64, 16}, std::nan("")), values = keys.clone();
    std::vector<int32_t> table = {3, 1, 0};
    for (const auto& [begin, end] :
         {std::pair<int64_t, int64_t>{0, 40}, {40, 41}, {41, 90}, {90, 180}, {180, 190}}) {
      for (int64_t block = 0; block < FirstKey(begin, window) / 64; ++block) table[block] = 2;
      const int64_t rows = end - begin;
      const auto chunk = [start = begin, rows](const at::Tensor& x) {
        return x.narrow(0, start, rows);
      };
      const at::Tensor out = CachedAttention(
          chunk(q), chunk(k), chunk(v), {0, rows},
          {.starts = {begin}, .block_table = BlockTable({table})}, keys, values, scores);
      EXPECT_TRUE(at::equal(out, chunk(whole))) << window << " " << begin;
    }
  }
}

// The rows attend to rounded keys and values, their own included, however they are divided into
// passes.
TEST_F(OpsTest, ABfloat16CacheEqualsAFloat32CacheOfRoundedKeysAndValues) {
  c10::InferenceMode guard;
  const int64_t length = 150;
  for (const int64_t head_dim : {16, 20}) {
    const at::Tensor q = at::randn({length, 6, head_dim}), k = at::randn({length, 3, head_dim});
    const at::Tensor v = at::randn({length, 3, head_dim});
    const auto rounded = [](const at::Tensor& x) { return x.to(at::kBFloat16).to(at::kFloat); };
    const auto attend = [&](at::ScalarType type, const at::Tensor& keys, const at::Tensor& values,
                            const std::vector<int64_t>& ends) {
      const at::Tensor key_cache = at::full({4, 3, 64, head_dim}, std::nan("")).to(type);
      const at::Tensor value_cache = key_cache.clone(), table = BlockTable({{3, 1, 0}});
      std::vector<at::Tensor> outputs;
      int64_t begin = 0;
      for (const int64_t end : ends) {
        const auto rows = [&](const at::Tensor& x) { return x.narrow(0, begin, end - begin); };
        outputs.push_back(CachedAttention(rows(q), rows(keys), rows(values), {0, end - begin},
                                          Planned({0, end - begin}, {begin}, table), key_cache,
                                          value_cache));
        begin = end;
      }
      return at::cat(outputs);
    };
    const at::Tensor expected = attend(at::kFloat, rounded(k), rounded(v), {length});
    EXPECT_FALSE(at::equal(expected, attend(at::kFloat, k, v, {length})));
    EXPECT_TRUE(at::equal(attend(at::kBFloat16, k, v, {length}), expected));
    EXPECT_TRUE(at::equal(attend(at::kBFloat16, k, v, {40, 41, 64, 149, length}), expected));
    SetKernelPath(KernelPath::kAten);
    const at::Tensor aten = attend(at::kBFloat16, k, v, {40, 41, 64, 149, length});
    SetKernelPath(KernelPath::kAuto);
    EXPECT_LE((aten - expected).abs().max().item<double>(), 1e-5);
  }
}

TEST_F(OpsTest, ACacheOfAnotherTypeIsRefused) {
  c10::InferenceMode guard;
  const at::Tensor q = at::randn({1, 2, 16}), k = at::randn({1, 1, 16});
  const at::Tensor half = at::zeros({1, 1, 64, 16}, at::kHalf);
  EXPECT_THROW(CachedAttention(q, k, k, {0, 1}, {{0}, BlockTable({{0}})}, half, half), c10::Error);
}

TEST_F(OpsTest, InferenceRowsDoNotDependOnTheBatch) {
  c10::InferenceMode guard;
  const at::Tensor x = at::randn({300, 96}), w = at::randn({200, 96});
  const at::Tensor all = Linear(x, w);
  for (const int64_t row : {0, 1, 150, 299}) {
    EXPECT_TRUE(at::equal(Linear(x.narrow(0, row, 1), w), all.narrow(0, row, 1)));
  }
}

TEST_F(OpsTest, LinearRowsDoNotDependOnTheThreads) {
  c10::InferenceMode guard;
  const int threads_before = at::get_num_threads();
  for (const int64_t out : {1, 20, 300}) {  // with few columns threads divide the rows too
    const at::Tensor x = at::randn({130, 300}), w = at::randn({out, 300});
    at::set_num_threads(1);
    const at::Tensor one = Linear(x, w);
    at::set_num_threads(3);
    EXPECT_TRUE(at::equal(Linear(x, w), one)) << out;
  }
  at::set_num_threads(threads_before);
}

using Leaves = const std::vector<at::Tensor>&;

TEST_F(OpsTest, GradientsAreThoseOfAten) {
  ExpectTheGradientsOfAten(
      {at::randn({19, 33}), at::randn({21, 33}), at::randn({21}), at::randn({19, 21})},
      [](Leaves x) { return LinearAdd(x[3], x[0], x[1], x[2]); });
  for (const int64_t rows : {3, 130}) {  // one chunk of the weight's gradient, and several
    ExpectTheGradientsOfAten({at::randn({rows, 60}), at::randn({12})}, [](Leaves x) {
      return RmsNorm(x[0].narrow(1, 24, 36).unflatten(1, {3, 12}), x[1], 1e-3);
    });
  }
  const at::Tensor cos = at::randn({9, 6}), sin = at::randn({9, 6});
  ExpectTheGradientsOfAten({at::randn({9, 5, 12})},
                           [&](Leaves x) { return RotaryEmbedding(x[0], cos, sin); });
  const at::Tensor some_cos = at::randn({9, 4}), some_sin = at::randn({9, 4});
  ExpectTheGradientsOfAten({at::randn({9, 5, 12})},
                           [&](Leaves x) { return RotaryEmbedding(x[0], some_cos, some_sin); });
  ExpectTheGradientsOfAten({3 * at::randn({9, 80})},
                           [](Leaves x) { return SwiGlu(x[0].narrow(1, 5, 70)); });
  ExpectTheGradientsOfAten({3 * at::randn({9, 80})}, [](Leaves x) {
    return Gated(x[0].narrow(1, 5, 70), GateActivation::kGeluTanh);
  });
  ExpectTheGradientsOfAten({at::randn({9, 30}), at::randn({30})},
                           [](Leaves x) { return RmsNorm(x[0], x[1], 1e-3, 1.0); });
  ExpectTheGradientsOfAten({at::randn({30, 4, 8}), at::randn({30, 2, 8}), at::randn({30, 2, 8})},
                           [](Leaves x) {
                             return CausalAttention(x[0], x[1], x[2], {0, 2, 2, 30});
                           });
  // The rows of a sequence are divided only above 256.
  for (const int64_t window : {1, 29, 100, 300, 600}) {
    ExpectTheGradientsOfAten(
        {at::randn({700, 4, 8}), at::randn({700, 2, 8}), at::randn({700, 2, 8})}, [&](Leaves x) {
          return CausalAttention(x[0], x[1], x[2], {0, 30, 100, 700}, {.window = window});
        });
  }
  ExpectTheGradientsOfAten({at::randn({30, 4, 8}), at::randn({30, 2, 8}), at::randn({30, 2, 8})},
                           [](Leaves x) {
                             return CausalAttention(x[0], x[1], x[2], {0, 2, 30}, {.scale = 0.7});
                           });
}

// The oracle is autograd through whole matrices of scores, in double.
TEST_F(OpsTest, GradientsGoThroughSoftCaps) {
  const auto expect = [](const std::vector<at::Tensor>& values, const auto& oracle,
                         const auto& fn) {
    std::vector<at::Tensor> exact;
    for (const at::Tensor& value : values) exact.push_back(value.to(at::kDouble).requires_grad_());
    const at::Tensor expected = oracle(exact), dy = at::randn(expected.sizes(), at::kDouble);
    expected.backward(dy);
    for (const KernelPath path : {KernelPath::kAuto, KernelPath::kAten}) {
      for (const at::ScalarType type : {at::kFloat, at::kDouble}) {
        SetKernelPath(path);
        std::vector<at::Tensor> leaves;
        for (const at::Tensor& value : values) {
          leaves.push_back(value.to(type, /*non_blocking=*/false, /*copy=*/true).requires_grad_());
        }
        const at::Tensor y = fn(leaves);
        y.backward(dy.to(type));
        SetKernelPath(KernelPath::kAuto);
        const double tolerance = type == at::kFloat ? 1e-5 : 1e-12;
        EXPECT_LE((y - expected).abs().max().item<double>(), tolerance);
        for (size_t i = 0; i < leaves.size(); ++i) {
          const at::Tensor wanted = exact[i].grad();
          EXPECT_LE((leaves[i].grad() - wanted).abs().max().item<double>(),
                    tolerance * std::max(1.0, wanted.abs().max().item<double>()))
              << i << " " << type;
        }
      }
    }
  };
  expect(
      {3 * at::randn({9, 30})}, [](Leaves x) { return 2.5 * at::tanh(x[0] / 2.5); },
      [](Leaves x) { return SoftCap(x[0], 2.5); });
  // Above 256 rows a window divides them.
  const std::vector<int64_t> offsets = {0, 2, 2, 400};
  for (const AttentionScores& scores : {AttentionScores{.soft_cap = 1.5},
                                        {.window = 29, .soft_cap = 1.5},
                                        {.window = 300, .scale = 0.7, .soft_cap = 3.0}}) {
    expect(
        {2 * at::randn({400, 4, 8}), at::randn({400, 2, 8}), at::randn({400, 2, 6})},
        [&](Leaves x) {
          std::vector<at::Tensor> outputs;
          for (size_t s = 0; s + 1 < offsets.size(); ++s) {
            const int64_t length = offsets[s + 1] - offsets[s];
            const auto heads = [&](const at::Tensor& one) {
              return one.narrow(0, offsets[s], length)
                  .repeat_interleave(4 / one.size(1), 1)
                  .transpose(0, 1);
            };
            const at::Tensor position = at::arange(length);
            const at::Tensor distance = position.unsqueeze(1) - position;
            const at::Tensor products = at::matmul(heads(x[0]), heads(x[1]).transpose(1, 2));
            const double cap = *scores.soft_cap;
            const at::Tensor capped = cap * at::tanh(products * scores.ScaleOf(8) / cap);
            const at::Tensor hidden = (distance < 0).logical_or(distance >= scores.window);
            const at::Tensor p =
                capped.masked_fill(hidden, -std::numeric_limits<double>::infinity()).softmax(-1);
            outputs.push_back(at::matmul(p, heads(x[2])).transpose(0, 1).flatten(1));
          }
          return at::cat(outputs);
        },
        [&](Leaves x) { return CausalAttention(x[0], x[1], x[2], offsets, scores); });
  }
}

// The oracle is a softmax over scaled scores that are masked by hand, in double.
TEST_F(OpsTest, AttentionScoresAreScaledAndHiddenBeforeTheWindow) {
  const int64_t length = 600;
  const at::Tensor q = at::randn({length, 2, 8}), k = at::randn({length, 1, 8});
  const at::Tensor v = at::randn({length, 1, 8});
  const auto heads = [](const at::Tensor& x) { return x.transpose(0, 1).to(at::kDouble); };
  const at::Tensor position = at::arange(length);
  const at::Tensor distance = position.unsqueeze(1) - position;
  for (const AttentionScores& options : {AttentionScores{.window = 1},
                                         {.window = 29},
                                         {.window = 64},
                                         {.window = 300},
                                         {.window = 600},
                                         {.scale = 0.7},
                                         {.window = 29, .scale = 0.7},
                                         {.soft_cap = 1.5},
                                         {.window = 29, .soft_cap = 3.0},
                                         {.window = 300, .scale = 0.7, .soft_cap = 50.0}}) {
    const at::Tensor hidden = (distance < 0).logical_or(distance >= options.window);
    at::Tensor scores = at::matmul(heads(q), heads(k).transpose(1, 2))
                            .mul(options.scale.value_or(1 / std::sqrt(8.0)));
    if (options.soft_cap) scores = *options.soft_cap * at::tanh(scores / *options.soft_cap);
    scores = scores.masked_fill(hidden, -std::numeric_limits<double>::infinity());
    const at::Tensor expected =
        at::matmul(scores.softmax(-1), heads(v)).transpose(0, 1).flatten(1).to(at::kFloat);
    for (const KernelPath path : {KernelPath::kAuto, KernelPath::kAten}) {
      SetKernelPath(path);
      const at::Tensor y = CausalAttention(q, k, v, {0, length}, options);
      SetKernelPath(KernelPath::kAuto);
      EXPECT_LE((y - expected).abs().max().item<double>(), 5e-6) << options.window;
    }
  }
}

TEST_F(OpsTest, FrozenWeightCostsNoProduct) {
  const at::Tensor leaf = at::randn({19, 33}).requires_grad_(), w = at::randn({21, 33});
  Linear(leaf, w).sum().backward();
  EXPECT_FALSE(w.grad().defined());
  EXPECT_TRUE(leaf.grad().defined());
}

TEST_F(OpsTest, GradientsDoNotDependOnTheThreads) {
  const int threads_before = at::get_num_threads();
  std::vector<at::Tensor> gradients;
  const at::Tensor x = at::randn({300, 96}), w = at::randn({96, 96}), norm = at::randn({96});
  for (const int threads : {1, 3}) {
    at::set_num_threads(threads);
    const at::Tensor xi = x.clone().requires_grad_(), wi = w.clone().requires_grad_();
    const at::Tensor ni = norm.clone().requires_grad_();
    const at::Tensor h = Linear(RmsNorm(xi, ni, 1e-5), wi);
    const at::Tensor heads = h.view({300, 6, 16}), shared = heads.narrow(1, 0, 2);
    const at::Tensor y =
        CausalAttention(heads, shared, shared, {0, 30, 170, 300}) +
        CausalAttention(heads, shared, shared, {0, 30, 170, 300}, {.soft_cap = 2.0});
    SwiGlu(Linear(y, wi)).pow(2).sum().backward();
    gradients.push_back(at::cat({xi.grad().flatten(), wi.grad().flatten(), ni.grad().flatten()}));
  }
  at::set_num_threads(threads_before);
  EXPECT_TRUE(at::equal(gradients[0], gradients[1]));
}

// A device and a type for which ATen computes, compared with the CPU kernels in fp32.
struct AtenCase {
  const char* name;
  at::DeviceType device;
  at::ScalarType dtype;
  double tolerance;  // for numbers of magnitude 1
};

class AtenPathTest : public testing::TestWithParam<AtenCase> {
 protected:
  void SetUp() override {
    if (GetParam().device == at::kCUDA && !at::hasCUDA()) GTEST_SKIP() << "no usable GPU";
    at::manual_seed(2);
  }
  void TearDown() override { SetKernelPath(KernelPath::kAuto); }

  // Returns N(0, 1) numbers on the CPU in fp32, representable in the type under test.
  static at::Tensor Normal(at::IntArrayRef shape) {
    return at::randn(shape).to(GetParam().dtype).to(at::kFloat);
  }
  static at::Tensor Moved(const at::Tensor& x) {
    return x.to(GetParam().device, GetParam().dtype, /*non_blocking=*/false, /*copy=*/true);
  }

  // Expects the same result from fn(on) on ATen and on the kernels; on(x) moves an operand to the
  // device and the type.
  template <typename Function>
  static void ExpectTheKernelsResult(const Function& fn) {
    c10::InferenceMode guard;
    SetKernelPath(KernelPath::kAuto);
    const at::Tensor expected = fn([](const at::Tensor& x) { return x.clone(); });
    SetKernelPath(KernelPath::kAten);
    const at::Tensor result = fn(Moved);
    EXPECT_EQ(result.scalar_type(), GetParam().dtype);
    EXPECT_EQ(result.device().type(), GetParam().device);
    ASSERT_EQ(result.sizes(), expected.sizes());
    const at::Tensor difference = (result.to(at::kCPU, at::kFloat) - expected).abs();
    const double scale = std::max(1.0, expected.abs().max().item<double>());
    EXPECT_LE(difference.max().item<double>(), GetParam().tolerance * scale);
  }
};

INSTANTIATE_TEST_SUITE_P(DeviceAndType, AtenPathTest,
                         testing::Values(AtenCase{"CpuFloat32", at::kCPU, at::kFloat, 1e-5},
                                         AtenCase{"CpuBfloat16", at::kCPU, at::kBFloat16, 2e-2},
                                         AtenCase{"CudaFloat32", at::kCUDA, at::kFloat, 1e-5},
                                         AtenCase{"CudaBfloat16", at::kCUDA, at::kBFloat16, 2e-2}),
                         [](const auto& info) { return std::string(info.param.name); });

TEST_P(AtenPathTest, LinearMaps) {
  const at::Tensor x = Normal({7, 50}), w = Normal({13, 50}), bias = Normal({13});
  const at::Tensor residual = Normal({7, 13});
  ExpectTheKernelsResult([&](auto on) { return Linear(on(x), on(w), on(bias)); });
  ExpectTheKernelsResult([&](auto on) { return LinearAdd(on(residual), on(x), on(w), on(bias)); });
}

TEST_P(AtenPathTest, NormRotaryGateAndEmbedding) {
  const at::Tensor x = Normal({9, 5, 12}), weight = at::randn({12});
  const at::Tensor cos = at::randn({9, 6}), sin = at::randn({9, 6});
  const at::Tensor gate_up = Normal({9, 66});
  const at::Tensor table = Normal({20, 4}), tokens = at::tensor({3, 0, 19}, at::kLong);
  ExpectTheKernelsResult([&](auto on) {
    const at::Tensor moved = on(x);
    return RmsNorm(moved, weight.to(moved.device()), 1e-5);  // an fp32 master
  });
  ExpectTheKernelsResult([&](auto on) {
    const at::Tensor moved = on(x);
    return RotaryEmbedding(moved, cos.to(moved.device()), sin.to(moved.device()));
  });
  ExpectTheKernelsResult([&](auto on) {  // of some columns of a head
    const at::Tensor moved = on(x), some = cos.narrow(1, 0, 4).contiguous().to(moved.device());
    return RotaryEmbedding(moved, some, some);
  });
  ExpectTheKernelsResult([&](auto on) { return SwiGlu(on(gate_up)); });
  ExpectTheKernelsResult([&](auto on) { return SoftCap(on(gate_up), 2.5); });
  ExpectTheKernelsResult([&](auto on) { return Gated(on(gate_up), GateActivation::kGeluTanh); });
  ExpectTheKernelsResult([&](auto on) {
    const at::Tensor moved = on(table);
    return Embedding(tokens.to(moved.device()), moved);
  });
}

TEST_P(AtenPathTest, CausalAttentionOfRaggedBatches) {
  const at::Tensor q = Normal({50, 6, 16}), k = Normal({50, 2, 16}), v = Normal({50, 2, 16});
  for (const int64_t window : kWindows) {
    ExpectTheKernelsResult([&](auto on) {
      return CausalAttention(on(q), on(k), on(v), {0, 1, 1, 37, 50}, {.window = window});
    });
    ExpectTheKernelsResult([&](auto on) {
      return CausalAttention(on(q), on(k), on(v), {0, 1, 1, 37, 50},
                             {.window = window, .soft_cap = 2.0});
    });
  }
}

// The cache has the type of the operands, or bfloat16, or float32.
TEST_P(AtenPathTest, CachedAttentionContinuesSequences) {
  const at::Tensor q = Normal({100, 6, 16}), k = Normal({100, 2, 16}), v = Normal({100, 2, 16});
  const auto run = [&](at::ScalarType cache, const AttentionScores& scores) {
    ExpectTheKernelsResult([&](auto on) {
      const at::Tensor empty = at::full({5, 2, 64, 16}, std::nan(""));
      const at::Tensor keys = on(empty).to(cache), values = keys.clone();
      const auto pass = [&](int64_t begin, const std::vector<int64_t>& offsets,
                            const std::vector<std::vector<int32_t>>& tables,
                            const std::vector<int64_t>& starts) {
        const auto rows = [&](const at::Tensor& x) {
          return on(x.narrow(0, begin, offsets.back()));
        };
        return CachedAttention(rows(q), rows(k), rows(v), offsets,
                               Planned(offsets, starts, BlockTable(tables), keys.device()), keys,
                               values, scores);
      };
      // A prompt; more rows of it, into a second block, beside another prompt; more rows of both;
      // one row of each; one row beside several, of which some are of no sequence's.
      return at::cat({pass(0, {0, 60}, {{4}}, {0}), pass(60, {0, 6, 20}, {{4, 1}, {2, 0}}, {60, 0}),
                      pass(80, {0, 5, 15}, {{2}, {4, 1}}, {14, 66}),
                      pass(95, {0, 1, 2}, {{2}, {4, 1}}, {19, 76}),
                      pass(97, {0, 1, 1, 3}, {{4, 1}, {3}, {2}}, {77, 0, 20})});
    });
  };
  for (const at::ScalarType cache : {GetParam().dtype, at::kBFloat16, at::kFloat}) {
    for (const int64_t window : kWindows) {
      run(cache, {.window = window});
      run(cache, {.window = window, .soft_cap = 2.0});
    }
  }
}

TEST_P(AtenPathTest, SingleRowsAttendInPartsAndByNumberOfBlocks) {
  c10::InferenceMode guard;
  // Sequences of 1 to 4 blocks, whose last row is new.
  const std::vector<int64_t> starts = {3, 200, 64, 0, 130, 191, 63};
  const auto count = static_cast<int64_t>(starts.size());
  std::vector<int64_t> offsets = {0};
  std::vector<std::vector<int32_t>> blocks;
  int32_t next = 0;
  for (const int64_t start : starts) {
    offsets.push_back(offsets.back() + 1);
    for (blocks.emplace_back(); std::ssize(blocks.back()) * 64 <= start;) {
      blocks.back().push_back(next++);
    }
  }
  const at::Tensor cache = Normal({next, 2, 64, 16});
  const at::Tensor q = Moved(Normal({count, 6, 16})), k = Moved(Normal({count, 2, 16}));
  const PagedSequences sequences = Planned(offsets, starts, BlockTable(blocks), q.device());
  EXPECT_EQ(sequences.rows.together.size(), 3);
  for (const int64_t window : kWindows) {
    const auto attend = [&](int64_t gathered) {
      const at::Tensor keys = Moved(cache), values = keys.clone();
      return AtenCachedAttention(q, k, k, offsets, sequences, keys, values, {.window = window},
                                 gathered);
    };
    const at::Tensor whole = attend(int64_t{1} << 26);
    for (const int64_t gathered : {1, 2 * 64 * 2 * 16, 5 * 64 * 2 * 16}) {
      EXPECT_TRUE(at::allclose(attend(gathered), whole, 0, GetParam().tolerance)) << gathered;
    }
  }
}

TEST_P(AtenPathTest, TheOperationsOfSingleRowsDoNotGrowWithTheirNumber) {
  const auto operations = [](int32_t count) {
    const at::Tensor q = Moved(Normal({count, 6, 16})), k = Moved(Normal({count, 2, 16}));
    const at::Tensor keys = Moved(Normal({count, 2, 64, 16})), values = keys.clone();
    std::vector<int64_t> offsets = {0};
    std::vector<std::vector<int32_t>> blocks;
    for (int32_t s = 0; s < count; ++s) {
      offsets.push_back(s + 1);
      blocks.push_back({s});
    }
    const PagedSequences sequences =
        Planned(offsets, std::vector<int64_t>(count, 9), BlockTable(blocks), q.device());
    c10::InferenceMode guard;
    SetKernelPath(KernelPath::kAten);
    return Operations([&] { CachedAttention(q, k, k, offsets, sequences, keys, values); });
  };
  const int64_t few = operations(4);
  EXPECT_GT(few, 10);
  EXPECT_EQ(operations(64), few);
}

TEST_P(AtenPathTest, HasGradients) {
  SetKernelPath(KernelPath::kAten);
  const at::Tensor x = Moved(at::randn({6, 16})).requires_grad_();
  const at::Tensor w = Moved(at::randn({16, 16})).requires_grad_();
  const at::Tensor norm = at::ones({16}).to(GetParam().device).requires_grad_();
  const at::Tensor angle = at::randn({6, 4}).to(GetParam().device);
  const at::Tensor h = Linear(RmsNorm(x, norm, 1e-5), w);
  const at::Tensor heads = RotaryEmbedding(h.view({6, 2, 8}), angle.cos(), angle.sin());
  const at::Tensor y = CausalAttention(heads, heads, heads, {0, 2, 6}) +
                       CausalAttention(heads, heads, heads, {0, 2, 6}, {.soft_cap = 2.0});
  SoftCap(SwiGlu(LinearAdd(x, y, w)), 3.0).sum().backward();
  for (const at::Tensor& leaf : {x, w, norm}) {
    ASSERT_TRUE(leaf.grad().defined());
    EXPECT_EQ(leaf.grad().scalar_type(), leaf.scalar_type());
    EXPECT_GT(leaf.grad().abs().sum().item<double>(), 0);
  }
}

TEST_F(OpsTest, RotaryTableGrowsAndKeepsItsValues) {
  RotaryTable table({1.0f, 0.01f}, 1.0, /*longest_sequence=*/4096, at::kCPU);
  const auto [cos, sin] = table.Rows(at::tensor({int64_t{3}, int64_t{0}}), 4);
  EXPECT_NEAR(cos[0][0].item<double>(), std::cos(3.0), 1e-7);
  EXPECT_NEAR(sin[0][1].item<double>(), std::sin(0.03), 1e-7);
  EXPECT_EQ(cos[1][0].item<double>(), 1.0);
  const auto [far_cos, far_sin] = table.Rows(at::tensor({int64_t{5000}, int64_t{3}}), 5001);
  EXPECT_NEAR(far_cos[0][1].item<double>(), std::cos(50.0), 1e-6);
  EXPECT_TRUE(at::equal(far_cos[1], cos[0]));
}

TEST(RotaryTableLengthTest, ATableDoublesUpToTheLongestSequence) {
  EXPECT_EQ(RotaryTableLength(0, 4, 4096), 512);
  EXPECT_EQ(RotaryTableLength(512, 513, 4096), 1024);
  EXPECT_EQ(RotaryTableLength(512, 3000, 4096), 3000);
  EXPECT_EQ(RotaryTableLength(3000, 3001, 4096), 4096);
  EXPECT_EQ(RotaryTableLength(0, 4, 100), 100);
  EXPECT_EQ(RotaryTableLength(4096, 5001, 4096), 5001) << "what is asked for is there";
}

}  // namespace
}  // namespace tandem::ops
