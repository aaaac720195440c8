// Linear maps with the shapes of SmolLM2-135M: own kernels beside ATen's (MKL on x86), on one core.
//
//     build/release/bin/tandem-linear-bench --benchmark_repetitions=5
//
// "Ours" is ops::Linear, "OursBackward" ops::MatrixProduct. "FLOPS" is floating-point operations
// per second of CPU time on one thread.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <benchmark/benchmark.h>
#include <c10/core/InferenceMode.h>

#include "common/ops/matrix_product.h"
#include "common/ops/ops.h"

namespace {

// Arguments: rows, in, out.
template <typename Function>
void Run(benchmark::State& state, const Function& product) {
  const c10::InferenceMode guard;
  at::set_num_threads(1);
  const at::Tensor x = at::randn({state.range(0), state.range(1)});
  const at::Tensor w = at::randn({state.range(2), state.range(1)});
  for (auto _ : state) benchmark::DoNotOptimize(product(x, w));
  state.counters["FLOPS"] = benchmark::Counter(
      2.0 * static_cast<double>(state.range(0) * state.range(1) * state.range(2)),
      benchmark::Counter::kIsIterationInvariantRate);
}

void Shapes(benchmark::internal::Benchmark* benchmark) {
  for (const int64_t rows : {1, 8, 64, 512}) {
    benchmark->Args({rows, 576, 576})->Args({rows, 576, 1536})->Args({rows, 1536, 576});
  }
}

void Ours(benchmark::State& state) {
  Run(state, [](const at::Tensor& x, const at::Tensor& w) { return tandem::ops::Linear(x, w); });
}
void Aten(benchmark::State& state) {
  Run(state, [](const at::Tensor& x, const at::Tensor& w) { return at::mm(x, w.t()); });
}
void OursBackward(benchmark::State& state) {
  Run(state, [](const at::Tensor& x, const at::Tensor& w) {
    return tandem::ops::MatrixProduct(x, w.t());
  });
}

BENCHMARK(Ours)->Apply(Shapes);
BENCHMARK(Aten)->Apply(Shapes);
BENCHMARK(OursBackward)->Apply(Shapes);

}  // namespace

BENCHMARK_MAIN();
