// Operations of a GPU with the project's kernels: the results of the CPU's.
#include "tests/gpu/simulated/kernels.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <deque>
#include <utility>
#include <vector>

#include "common/ops/attention/paged_sequences.h"
#include "common/ops/device_kernels.h"
#include "common/ops/experts/expert_rows.h"
#include "common/ops/linear/grouped_linear.h"
#include "common/ops/linear/linear_stack.h"
#include "common/ops/ops.h"
#include "tests/gpu/simulated/counts.h"

namespace tandem::ops {
namespace {

const at::Device kGpu(at::kCUDA, 0);

class SimulatedKernelsTest : public testing::TestWithParam<at::ScalarType> {
 protected:
  SimulatedKernelsTest() { at::manual_seed(4); }

  // Returns normal numbers that the type under test represents.
  static at::Tensor Normal(at::IntArrayRef shape, double deviation = 1) {
    return (at::randn(shape) * deviation).to(GetParam()).to(at::kFloat);
  }

  // Expects the CPU's result from fn(on), in one launch; on(x) moves an operand.
  template <typename Function>
  void ExpectTheCpusResult(const Function& fn) {
    const c10::InferenceMode inference_mode;
    const at::Tensor expected = fn([](const at::Tensor& x) { return x; });
    const auto on_gpu = [](const at::Tensor& x) { return x.to(kGpu, GetParam()); };
    const simulated_gpu::WithKernels kernels;
    const int64_t before = simulated_gpu::TheCounts().launches;
    int64_t copies = 0;
    const at::Tensor result = fn([&](const at::Tensor& x) {
      const int64_t start = simulated_gpu::TheCounts().launches;
      at::Tensor moved = on_gpu(x);
      copies += simulated_gpu::TheCounts().launches - start;
      return moved;
    });
    EXPECT_EQ(simulated_gpu::TheCounts().launches - before - copies, 1);
    EXPECT_EQ(result.scalar_type(), GetParam());
    const double tolerance = GetParam() == at::kFloat ? 2e-6 : 4e-3;
    const at::Tensor difference = (result.cpu().to(at::kFloat) - expected).abs();
    EXPECT_LE((difference / expected.abs().clamp_min(1)).max().item<double>(), tolerance);
  }
};

INSTANTIATE_TEST_SUITE_P(Types, SimulatedKernelsTest, testing::Values(at::kFloat, at::kBFloat16),
                         [](const auto& info) { return std::string(at::toString(info.param)); });

TEST_P(SimulatedKernelsTest, RmsNorm) {
  for (const int64_t width : {1, 33, 256, 1000}) {
    const at::Tensor x = Normal({5, width}, 3), weight = Normal({width});
    for (const double offset : {0.0, 1.0}) {
      ExpectTheCpusResult([&](auto on) { return ops::RmsNorm(on(x), on(weight), 1e-5, offset); });
    }
  }
  // The heads of a fused projection.
  const at::Tensor fused = Normal({4, 100}), weight = Normal({12});
  ExpectTheCpusResult([&](auto on) {
    return ops::RmsNorm(on(fused).narrow(1, 10, 60).view({4, 5, 12}), on(weight), 1e-5);
  });
}

// Other allocations of the device lie beside that memory.
TEST(KernelMemoryTest, AKernelReachesOnlyTheMemoryOfItsArguments) {
  constexpr int64_t kWidth = 4096;  // a row is more than a page
  const at::Tensor before = at::ones({2, kWidth}, kGpu), x = at::ones({2, kWidth}, kGpu),
                   after = at::ones({2, kWidth}, kGpu), weight = at::ones({kWidth}, kGpu),
                   y = at::empty({3, kWidth}, kGpu);
  const auto norm = [&](int64_t rows, int64_t stride) {
    const simulated_gpu::WithKernels kernels;
    Launch("RMSNorm", kGpu, DeviceKernelsOf(kGpu).rms_norm,
           {.x = x.const_data_ptr(),
            .row_stride = stride,
            .head_stride = kWidth,
            .weight = weight.const_data_ptr(),
            .y = y.mutable_data_ptr(),
            .rows = rows,
            .heads = 1,
            .width = kWidth,
            .eps = 1e-5f,
            .offset = 0,
            .bfloat16 = false});
  };
  norm(2, kWidth);
  EXPECT_TRUE(y.narrow(0, 0, 2).isfinite().all().item<bool>());
  EXPECT_DEATH(norm(3, kWidth), "");   // the row behind
  EXPECT_DEATH(norm(2, -kWidth), "");  // the row before
}

// As a junior that has a GPU of its own, computed by the senior's thread.
TEST_P(SimulatedKernelsTest, AnotherDeviceThanTheSelectedOne) {
  const c10::InferenceMode inference_mode;
  const simulated_gpu::WithKernels kernels;
  const at::Tensor x = Normal({3, 8}), weight = Normal({8});
  const auto norm = [&](at::Device device) {
    return ops::RmsNorm(x.to(device, GetParam()), weight.to(device, GetParam()), 1e-5);
  };
  EXPECT_TRUE(at::equal(norm({at::kCUDA, 1}).cpu(), norm(kGpu).cpu()));
}

TEST_P(SimulatedKernelsTest, Rotary) {
  const at::Tensor fused = Normal({7, 100}), angles = at::randn({7, 6});
  for (const int64_t half : {6, 4}) {  // all columns of a head, and some
    const at::Tensor cos = angles.narrow(1, 0, half).cos(), sin = angles.narrow(1, 0, half).sin();
    const at::Tensor cos_on_gpu = cos.to(kGpu), sin_on_gpu = sin.to(kGpu);
    ExpectTheCpusResult([&](auto on) {
      const at::Tensor x = on(fused).narrow(1, 10, 60).view({7, 5, 12});
      return x.is_cuda() ? RotaryEmbedding(x, cos_on_gpu, sin_on_gpu)
                         : RotaryEmbedding(x, cos.contiguous(), sin.contiguous());
    });
  }
}

TEST_P(SimulatedKernelsTest, Gates) {
  for (const int64_t width : {1, 256, 300}) {
    const at::Tensor x = Normal({6, 2 * width}, 3);
    for (const auto activation : {GateActivation::kSilu, GateActivation::kGeluTanh}) {
      ExpectTheCpusResult([&](auto on) { return Gated(on(x), activation); });
    }
  }
}

// Returns the matrices in one buffer, each at a multiple of `aligned` numbers.
at::Tensor Spaced(const at::Tensor& matrices, int64_t aligned) {
  const int64_t numbers = matrices[0].numel();
  const int64_t distance = (numbers + aligned - 1) / aligned * aligned;
  const at::Tensor spaced = at::empty({matrices.size(0) * distance}, matrices.options())
                                .as_strided(matrices.sizes(), {distance, matrices.size(2), 1});
  return spaced.copy_(matrices);
}

// Maps of the matrices [maps, out, in] in one buffer, with the adapters a [maps, rank, in] and
// b [maps, out, rank] if these are defined.
struct Maps {
  std::deque<LinearWeight> weights;
  std::vector<const LinearWeight*> pointers;

  Maps(const at::Tensor& stack, at::Device device, const at::Tensor& a = {},
       const at::Tensor& b = {}) {
    const at::Tensor moved = Spaced(stack.to(device), /*aligned=*/8);
    for (const at::Tensor& matrix : moved.unbind()) weights.push_back(Weight(matrix));
    Point();
    if (!a.defined()) return;
    const Maps of_a(a, device), of_b(b, device);
    adapters = {of_a.weights, of_b.weights};
    for (size_t i = 0; i < weights.size(); ++i) {
      weights[i].SetAdapter({.a = &adapters[0][i],
                             .maps = {{.column = 0, .width = stack.size(1), .b = &adapters[1][i]}},
                             .rank = b.size(2),
                             .scale = 0.5});
    }
  }

  // Maps of two masters each, in float32, that train; products are in another type.
  Maps(const at::Tensor& stack, at::Device device, at::ScalarType type) {
    const at::Tensor moved = Spaced(stack.to(device), /*aligned=*/8);
    const at::Tensor copies = Spaced(moved.to(type), /*aligned=*/8);
    for (int64_t i = 0; i < stack.size(0); ++i) {
      std::vector<at::Tensor> masters;
      for (const at::Tensor& half : moved[i].tensor_split(2)) {
        masters.push_back(half.detach().set_requires_grad(true));
      }
      weights.push_back({moved[i],
                         {},
                         masters,
                         {},
                         type,
                         /*rounds=*/false,
                         type == at::kFloat ? at::Tensor() : copies[i]});
    }
    Point();
  }

 private:
  void Point() {
    for (LinearWeight& weight : weights) pointers.push_back(&weight);
  }
  static LinearWeight Weight(const at::Tensor& matrix) {
    return {matrix, {}, {matrix}, {}, matrix.scalar_type()};
  }

  std::vector<std::deque<LinearWeight>> adapters;
};

// Experts of some tokens, all of a layer or a range of them, of which some have no row.
TEST_P(SimulatedKernelsTest, ExpertsWithoutAWait) {
  const c10::InferenceMode inference_mode;
  const simulated_gpu::WithKernels kernels;
  constexpr int64_t kTokens = 37, kExperts = 9, kChoices = 3;
  const at::Tensor experts = std::get<1>(at::rand({kTokens, kExperts - 1}).topk(kChoices, 1));
  const at::Tensor weights = at::rand({kTokens, kChoices});
  for (const auto& [in, out] : {std::pair<int64_t, int64_t>{24, 40}, {20, 33}}) {
    const at::Tensor x = Normal({kTokens, in}), stack = Normal({kExperts, out, in}, 0.2);
    const at::Tensor a = Normal({kExperts, 4, in}, 0.2), b = Normal({kExperts, out, 4}, 0.2);
    for (const bool adapts : {false, true}) {
      const Maps on_cpu(stack, at::kCPU, adapts ? a : at::Tensor(), b);
      const Maps on_gpu(stack.to(GetParam()), kGpu, adapts ? a.to(GetParam()) : at::Tensor(),
                        b.to(GetParam()));
      ASSERT_TRUE(AreStacked(on_gpu.pointers));
      const at::Tensor gpu_x = x.to(kGpu, GetParam()), gpu_experts = experts.to(kGpu);
      const at::Tensor gpu_weights = weights.to(kGpu);
      ASSERT_TRUE(CanGroupOnDevice(gpu_x));
      for (const auto& [first, count] : {std::pair<int64_t, int64_t>{0, kExperts}, {2, 4}}) {
        const auto range = [&](const std::vector<const LinearWeight*>& maps) {
          return std::vector(maps.begin() + first, maps.begin() + first + count);
        };
        const ExpertRows order = ExpertRows::OfRange(experts, kExperts, first, count);
        const at::Tensor expected = CombineExpertRows(
            GroupedLinear(GatherExpertRows(x, order), order.offsets, range(on_cpu.pointers)),
            weights, order);
        const int64_t waits = simulated_gpu::TheCounts().synchronizations;
        const ExpertRows there = ExpertRows::OnDevice(gpu_experts, kExperts, first, count);
        const at::Tensor result =
            CombineExpertRows(GroupedLinear(GatherExpertRows(gpu_x, there), there.device_offsets,
                                            range(on_gpu.pointers)),
                              gpu_weights, there);
        EXPECT_EQ(simulated_gpu::TheCounts().synchronizations, waits);
        EXPECT_TRUE(at::equal(there.rows.cpu(), order.rows));
        EXPECT_TRUE(at::equal(there.tokens.cpu().narrow(0, 0, order.tokens.numel()), order.tokens));
        EXPECT_TRUE(at::equal(there.device_offsets.cpu().to(at::kLong),
                              at::tensor(order.offsets, at::kLong)));
        const double tolerance = GetParam() == at::kFloat ? 2e-6 : 0.02;
        EXPECT_LE((result.cpu().to(at::kFloat) - expected).abs().max().item<double>(), tolerance)
            << in << " " << adapts << " " << first;
      }
    }
  }
}

// The gradients of a sum of some tokens' experts, in float64: of x, the weights of the choices and
// each matrix.
struct ExpertGradients {
  at::Tensor x, weights, stack;

  ExpertGradients(const at::Tensor& x_in, const at::Tensor& weights_in, const at::Tensor& stack_in,
                  const at::Tensor& experts, const at::Tensor& dy) {
    x = x_in.to(at::kDouble).requires_grad_();
    weights = weights_in.to(at::kDouble).requires_grad_();
    stack = stack_in.to(at::kDouble).requires_grad_();
    const at::Tensor chosen = stack.index({experts});  // [T, k, out, in]
    const at::Tensor outputs = at::einsum("tkoi,ti->tko", {chosen, x});
    (outputs * weights.unsqueeze(-1)).sum(1).backward(dy.to(at::kDouble));
    for (at::Tensor* leaf : {&x, &weights, &stack}) *leaf = leaf->grad();
  }
};

// All experts take part, but the last is never chosen. The second gradients are added to the first
// ones, which lie as the masters do, or apart.
TEST_P(SimulatedKernelsTest, ExpertsInTrainingWithoutAWait) {
  const simulated_gpu::WithKernels kernels;
  constexpr int64_t kTokens = 37, kExperts = 5, kChoices = 2;
  const at::Tensor experts = std::get<1>(at::rand({kTokens, kExperts - 1}).topk(kChoices, 1));
  const at::Tensor gpu_experts = experts.to(kGpu);
  for (const auto& [in, out] : {std::pair<int64_t, int64_t>{24, 40}, {20, 34}}) {
    const at::Tensor x = Normal({kTokens, in}), stack = Normal({kExperts, out, in}, 0.2);
    const at::Tensor weights = at::rand({kTokens, kChoices}), dy = Normal({kTokens, out});
    const ExpertGradients expected(x, weights, stack, experts, dy);
    for (const bool together : {false, true}) {
      const Maps maps(stack, kGpu, GetParam());
      if (together) {
        const at::Tensor zeros = Spaced(at::zeros(stack.sizes(), kGpu), 8);
        for (int64_t i = 0; i < kExperts; ++i) {
          const auto halves = zeros[i].tensor_split(2);
          for (size_t m = 0; m < 2; ++m) {
            at::Tensor(maps.pointers[i]->masters()[m]).mutable_grad() = halves[m].detach();
          }
        }
      }
      for (const int count : {1, 2}) {
        at::Tensor gpu_x = x.to(kGpu, GetParam()).requires_grad_();
        at::Tensor gpu_weights = weights.to(kGpu).requires_grad_();
        const at::Tensor gpu_dy = dy.to(kGpu, GetParam());
        const int64_t waits = simulated_gpu::TheCounts().synchronizations;
        const ExpertRows order = ExpertRows::OnDevice(gpu_experts, kExperts, 0, kExperts);
        const at::Tensor rows = GatherExpertRows(gpu_x, order);
        const at::Tensor outputs = GroupedLinear(rows, order.device_offsets, maps.pointers);
        const int64_t launches = simulated_gpu::TheCounts().launches;
        CombineExpertRows(outputs, gpu_weights, order).backward(gpu_dy);
        EXPECT_EQ(simulated_gpu::TheCounts().synchronizations, waits);
        // Not one for each expert, but where gradients lie apart.
        const int64_t of_backward = simulated_gpu::TheCounts().launches - launches;
        EXPECT_TRUE(!together || of_backward < 30) << of_backward;
        std::vector<at::Tensor> of_maps;
        for (const LinearWeight* map : maps.pointers) {
          of_maps.push_back(at::cat({map->masters()[0].grad(), map->masters()[1].grad()}));
        }
        const auto expect_near = [&](const at::Tensor& actual, const at::Tensor& gradient) {
          const at::Tensor apart = (actual.cpu().to(at::kDouble) - gradient).norm();
          EXPECT_LE((apart / gradient.norm()).item<double>(),
                    GetParam() == at::kFloat ? 1e-6 : 4e-3)
              << in << " " << together << " " << count;
        };
        expect_near(gpu_x.grad(), expected.x);
        expect_near(gpu_weights.grad(), expected.weights);
        expect_near(at::stack(of_maps), expected.stack * count);
      }
    }
  }
}

TEST(LinearStackTest, MapsThatLieApartAreNotStacked) {
  const at::Tensor stack = at::randn({3, 8, 16}), other = at::randn({3, 8, 16});
  const Maps maps(stack, at::kCPU), others(other, at::kCPU);
  EXPECT_TRUE(AreStacked(maps.pointers));
  EXPECT_TRUE(AreStacked({maps.pointers[1]}));
  EXPECT_TRUE(at::equal(StackOf({maps.pointers[1], maps.pointers[2]}), stack.narrow(0, 1, 2)));
  EXPECT_TRUE(AreStacked({maps.pointers[0], maps.pointers[2]})) << "at twice the distance";
  EXPECT_FALSE(AreStacked({maps.pointers[1], maps.pointers[0]}));
  EXPECT_FALSE(AreStacked({maps.pointers[0], others.pointers[1]}));
  std::deque<LinearWeight> odd;
  for (const at::Tensor& matrix : at::randn({2, 3, 5}).unbind()) {
    odd.push_back({matrix, {}, {matrix}, {}, at::kFloat});
  }
  EXPECT_FALSE(AreStacked({&odd[0], &odd[1]})) << "not aligned";
}

// Sequences of different lengths continue by rows of a pass.
struct Continued {
  std::vector<int64_t> offsets = {0}, starts;
  at::Tensor table;

  explicit Continued(const std::vector<std::pair<int64_t, int64_t>>& starts_and_rows) {
    int64_t longest = 0;
    for (const auto& [start, rows] : starts_and_rows) {
      starts.push_back(start);
      offsets.push_back(offsets.back() + rows);
      longest = std::max(longest, (start + rows + 63) / 64);
    }
    table = at::arange(std::ssize(starts) * longest, at::kInt).view({-1, longest}).flip(0);
    table = table.contiguous();
  }

  PagedSequences On(at::Device device) const {
    return {.starts = starts,
            .block_table = table.to(device),
            .rows = PlanPagedRows(offsets, starts, table, 64, device)};
  }
};

// One row in the first and in a later split of the keys, some, and in bfloat16 more than the kernel
// takes, between and beside the others.
TEST_P(SimulatedKernelsTest, CachedAttention) {
  const c10::InferenceMode inference_mode;
  const simulated_gpu::WithKernels kernels;
  const Continued pass({{0, 1}, {30, 20}, {200, 1}, {126, 4}, {0, 17}, {60, 19}});
  const int64_t rows = pass.offsets.back();
  const at::Tensor fused = Normal({rows, (6 + 2 + 2) * 12});
  const at::Tensor keys = Normal({pass.table.numel(), 2, 64, 12}), values = Normal(keys.sizes());
  const PagedSequences on_gpu = pass.On(kGpu), on_cpu = pass.On(at::kCPU);
  for (const AttentionScores& scores :
       {AttentionScores{}, {.window = 70, .scale = 0.7}, {.window = 5, .soft_cap = 2.0}}) {
    for (const at::ScalarType type : {at::kFloat, at::kBFloat16}) {
      const auto attend = [&](const auto& on, const PagedSequences& sequences,
                              const at::Tensor& key_cache, const at::Tensor& value_cache) {
        const auto heads = [x = on(fused)](int64_t first, int64_t count) {
          return x.narrow(1, first * 12, count * 12).view({x.size(0), count, 12});
        };
        return ops::CachedAttention(heads(0, 6), heads(6, 2), heads(8, 2), pass.offsets, sequences,
                                    key_cache, value_cache, scores);
      };
      at::Tensor cpu_keys = keys.to(type), cpu_values = values.to(type);
      const at::Tensor gpu_keys = cpu_keys.to(kGpu), gpu_values = cpu_values.to(kGpu);
      const at::Tensor expected =
          attend([](const at::Tensor& x) { return x; }, on_cpu, cpu_keys, cpu_values);
      const at::Tensor result = attend([](const at::Tensor& x) { return x.to(kGpu, GetParam()); },
                                       on_gpu, gpu_keys, gpu_values);
      EXPECT_TRUE(at::equal(gpu_keys.cpu(), cpu_keys));
      EXPECT_TRUE(at::equal(gpu_values.cpu(), cpu_values));
      EXPECT_EQ(result.scalar_type(), GetParam());
      const double tolerance = GetParam() == at::kFloat ? 2e-6 : 8e-3;
      EXPECT_LE((result.cpu().to(at::kFloat) - expected).abs().max().item<double>(), tolerance);
    }
  }
}

// The plan of a window is uploaded by its first layer.
TEST_P(SimulatedKernelsTest, CachedAttentionOfALayerIsThreeLaunches) {
  const c10::InferenceMode inference_mode;
  const simulated_gpu::WithKernels kernels;
  const auto launches = [](const std::vector<std::pair<int64_t, int64_t>>& starts_and_rows) {
    const Continued pass(starts_and_rows);
    const auto numbers = [](at::IntArrayRef shape) { return Normal(shape).to(kGpu, GetParam()); };
    const at::Tensor q = numbers({pass.offsets.back(), 4, 8}), k = numbers({q.size(0), 2, 8});
    const at::Tensor keys = numbers({pass.table.numel(), 2, 64, 8}), values = keys.clone();
    const PagedSequences sequences = pass.On(kGpu);
    std::vector<int64_t> of_layers;
    for (int layer = 0; layer < 2; ++layer) {
      const int64_t before = simulated_gpu::TheCounts().launches;
      ops::CachedAttention(q, k, k, pass.offsets, sequences, keys, values, {.soft_cap = 2.0});
      of_layers.push_back(simulated_gpu::TheCounts().launches - before);
    }
    return of_layers;
  };
  EXPECT_EQ(launches({{5, 1}}), (std::vector<int64_t>{3, 2}));  // nothing to fold
  EXPECT_EQ(launches({{150, 1}}), (std::vector<int64_t>{4, 3}));
  EXPECT_EQ(launches({{150, 1}, {0, 30}, {7, 3}, {300, 2}}), (std::vector<int64_t>{4, 3}));
}

// Training attends to sequences of several classes of lengths, one of which stands alone, in an
// order that mixes them; with windows, a soft cap and values of fewer columns.
TEST(PaddedAttentionTest, OutputsAndGradientsAreThoseOfTheSequences) {
  at::manual_seed(5);
  const std::vector<int64_t> offsets = {0, 3, 70, 70, 71, 90, 1190, 1195, 1260};
  const int64_t rows = offsets.back(), width = 12;
  for (const int64_t value_width : {width, int64_t{8}}) {
    const at::Tensor q = at::randn({rows, 4, width}), k = at::randn({rows, 2, width});
    const at::Tensor v = at::randn({rows, 2, value_width}), dy = at::randn({rows, 4 * value_width});
    for (const AttentionScores& scores : {AttentionScores{},
                                          {.window = 5, .scale = 0.4},
                                          {.soft_cap = 2.0},
                                          {.window = 40, .soft_cap = 1.5}}) {
      const auto attend = [&](at::Device device, bool one_by_one) {
        std::vector<at::Tensor> leaves;
        for (const at::Tensor& x : {q, k, v}) {
          leaves.push_back(x.to(device).detach().requires_grad_());
        }
        at::Tensor y;
        if (one_by_one) {
          std::vector<at::Tensor> outputs;
          for (size_t s = 0; s + 1 < offsets.size(); ++s) {
            const auto of = [&](const at::Tensor& x) {
              return x.slice(0, offsets[s], offsets[s + 1]);
            };
            const int64_t own = offsets[s + 1] - offsets[s];
            if (own == 0) continue;
            outputs.push_back(
                CausalAttention(of(leaves[0]), of(leaves[1]), of(leaves[2]), {0, own}, scores));
          }
          y = at::cat(outputs);
        } else {
          y = CausalAttention(leaves[0], leaves[1], leaves[2], offsets, scores);
        }
        y.backward(dy.to(device));
        std::vector<at::Tensor> all = {y.detach().cpu()};
        for (const at::Tensor& leaf : leaves) all.push_back(leaf.grad().cpu());
        return all;
      };
      const std::vector<at::Tensor> expected = attend(at::kCPU, /*one_by_one=*/true);
      const std::vector<at::Tensor> actual = attend(kGpu, /*one_by_one=*/false);
      for (size_t i = 0; i < expected.size(); ++i) {
        EXPECT_LE(((actual[i] - expected[i]).norm() / expected[i].norm()).item<double>(), 2e-6)
            << i << " " << scores.window << " " << value_width;
      }
      const at::NoGradGuard no_grad;
      const at::Tensor inferred =
          CausalAttention(q.to(kGpu), k.to(kGpu), v.to(kGpu), offsets, scores);
      EXPECT_TRUE(at::equal(inferred.cpu(), actual[0])) << scores.window;
    }
  }
}

// A cache of latent attention: one key, whose first columns are the value, of more columns than the
// kernel takes. Prompts, drafts and single rows, behind others and at the beginning.
TEST(PaddedAttentionTest, CachedRowsAreThoseOfTheCpu) {
  const c10::InferenceMode inference_mode;
  const simulated_gpu::WithKernels kernels;
  at::manual_seed(6);
  const Continued pass(
      {{0, 1}, {30, 20}, {200, 1}, {126, 4}, {0, 17}, {60, 300}, {0, 1100}, {7, 2}});
  const int64_t rows = pass.offsets.back(), width = 272, value_width = 40;
  const at::Tensor q = at::randn({rows, 3, width}), k = at::randn({rows, 1, width});
  const at::Tensor keys = at::randn({pass.table.numel(), 1, 64, width});
  for (const AttentionScores& scores : {AttentionScores{}, {.window = 70, .scale = 0.1}}) {
    const auto attend = [&](at::Device device) {
      const at::Tensor cache = keys.to(device, /*non_blocking=*/false, /*copy=*/true);
      const at::Tensor k_there = k.to(device);
      return ops::CachedAttention(q.to(device), k_there, k_there.narrow(2, 0, value_width),
                                  pass.offsets, pass.On(device), cache,
                                  cache.narrow(3, 0, value_width), scores)
          .cpu();
    };
    const at::Tensor expected = attend(at::kCPU), actual = attend(kGpu);
    EXPECT_LE((actual - expected).abs().max().item<double>(), 2e-5) << scores.window;
  }
}

}  // namespace
}  // namespace tandem::ops
