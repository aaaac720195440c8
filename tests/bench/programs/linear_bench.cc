// Linear maps of SmolLM2-135M and Qwen2.5-0.5B: own kernels beside ATen's (MKL on x86).
//
//     build/release/bin/tandem-linear-bench --benchmark_repetitions=5
//
// Dense float32 maps: "Ours" is ops::Linear, "OursBackward" ops::MatrixProduct, on one thread, with
// weights in the caches. "FLOPS" is floating-point operations per second of CPU time.
//
// Weights in main memory: "Packed" is ops::PackedWeight and "Dense" ops::Linear, each on so many
// copies of a map that no cache holds them; "Mkl" is at::mm. "RoundedInputs" is ops::PackedWeight
// in bfloat16 with inputs that it rounds, and "OneDnnBfloat16" at::linear of bfloat16. "Weights" is
// bytes of weights per second of time on the clock, to be compared with that of "ReadMemory", which
// only reads.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <benchmark/benchmark.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "common/ops/linear/bfloat16_linear.h"
#include "common/ops/ops.h"
#include "common/ops/products/matrix_product.h"
#include "common/ops/products/packed_weight.h"

namespace {

using benchmark::Counter;
using tandem::kernels::WeightFormat;

double Flop(int64_t rows, int64_t in, int64_t out) {
  return 2.0 * static_cast<double>(rows * in * out);
}

// Arguments: rows, in, out.
template <typename Function>
void Run(benchmark::State& state, const Function& product) {
  const c10::InferenceMode guard;
  at::set_num_threads(1);
  const at::Tensor x = at::randn({state.range(0), state.range(1)});
  const at::Tensor w = at::randn({state.range(2), state.range(1)});
  for (auto _ : state) benchmark::DoNotOptimize(product(x, w));
  state.counters["FLOPS"] = Counter(Flop(state.range(0), state.range(1), state.range(2)),
                                    Counter::kIsIterationInvariantRate);
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

// More than the last-level cache of the machines that the project is measured on.
constexpr int64_t kMemoryBytes = int64_t{128} << 20;

struct Shape {
  const char* name;
  int64_t in, out;
};
constexpr Shape kShapes[] = {
    {"smollm2_qkv", 576, 960},   {"smollm2_output", 576, 576}, {"smollm2_gate_up", 576, 3072},
    {"smollm2_down", 1536, 576}, {"smollm2_head", 576, 49152}, {"qwen_qkv", 896, 1152},
    {"qwen_gate_up", 896, 9728}, {"qwen_down", 4864, 896},     {"qwen_head", 896, 151936}};

void ReadMemory(benchmark::State& state) {
  at::set_num_threads(static_cast<int>(state.range(0)));
  const at::Tensor memory = at::ones({kMemoryBytes / 8}, at::kLong);
  const auto* const numbers = memory.const_data_ptr<int64_t>();
  for (auto _ : state) {
    at::parallel_for(0, memory.numel(), 1 << 16, [&](int64_t begin, int64_t end) {
      int64_t sum = 0;
      for (int64_t i = begin; i < end; ++i) sum += numbers[i];
      benchmark::DoNotOptimize(sum);
    });
  }
  state.counters["Weights"] =
      Counter(static_cast<double>(kMemoryBytes), Counter::kIsIterationInvariantRate);
}
BENCHMARK(ReadMemory)->Arg(1)->Arg(2)->UseRealTime();

// Multiplies by `copies` weights in turn, each of `bytes`: multiply(x, index of the weight).
// Arguments: rows, threads.
template <typename Function>
void RunFromMemory(benchmark::State& state, const Shape& shape, int64_t bytes, int64_t copies,
                   const Function& multiply) {
  const c10::InferenceMode guard;
  at::set_num_threads(static_cast<int>(state.range(1)));
  const int64_t rows = state.range(0);
  const at::Tensor x = at::randn({rows, shape.in});
  int64_t next = 0;
  for (auto _ : state) {
    benchmark::DoNotOptimize(multiply(x, static_cast<size_t>(next)));
    next = (next + 1) % copies;
  }
  state.counters["Weights"] =
      Counter(static_cast<double>(bytes), Counter::kIsIterationInvariantRate);
  state.counters["FLOPS"] =
      Counter(Flop(rows, shape.in, shape.out), Counter::kIsIterationInvariantRate);
}

int64_t Copies(int64_t bytes) { return std::max<int64_t>(1, kMemoryBytes / bytes); }

void Packed(benchmark::State& state, const Shape& shape, WeightFormat format, bool rounds = false) {
  const int64_t bytes = tandem::kernels::PackedBytes(format, shape.out, shape.in);
  // Packing takes longer than a measurement: the weights are kept for all numbers of rows.
  static std::pair<std::string, WeightFormat> packed;
  static std::vector<std::unique_ptr<tandem::ops::PackedWeight>> weights;
  const std::pair<std::string, WeightFormat> wanted(shape.name, format);
  const at::Tensor values = at::full({shape.out, shape.in}, 0.01);
  if (packed != wanted) weights.clear();
  packed = wanted;
  while (static_cast<int64_t>(weights.size()) < Copies(bytes)) {
    weights.push_back(std::make_unique<tandem::ops::PackedWeight>(format, shape.out, shape.in));
    weights.back()->SetRows(0, values);
  }
  RunFromMemory(state, shape, bytes, Copies(bytes), [&](const at::Tensor& x, size_t i) {
    return weights[i]->Linear(rounds ? tandem::ops::RoundedRows(x) : x, /*bias=*/{}, shape.out);
  });
}

template <typename Function>
void FromDense(benchmark::State& state, const Shape& shape, const Function& product,
               at::ScalarType type = at::kFloat) {
  const auto bytes = static_cast<int64_t>(c10::elementSize(type)) * shape.out * shape.in;
  const at::Tensor weights = at::full({Copies(bytes), shape.out, shape.in}, 0.01, type);
  RunFromMemory(state, shape, bytes, Copies(bytes), [&](const at::Tensor& x, size_t i) {
    return product(x, weights[static_cast<int64_t>(i)]);
  });
}
void Dense(benchmark::State& state, const Shape& shape) {
  FromDense(state, shape,
            [](const at::Tensor& x, const at::Tensor& w) { return tandem::ops::Linear(x, w); });
}
void Mkl(benchmark::State& state, const Shape& shape) {
  FromDense(state, shape,
            [](const at::Tensor& x, const at::Tensor& w) { return at::mm(x, w.t()); });
}

void OneDnnBfloat16(benchmark::State& state, const Shape& shape) {
  FromDense(
      state, shape,
      [](const at::Tensor& x, const at::Tensor& w) { return at::linear(x.to(at::kBFloat16), w); },
      at::kBFloat16);
}

void FromMemory(benchmark::internal::Benchmark* benchmark) {
  for (const int64_t rows : {1, 4, 8, 16}) {
    for (const int64_t threads : {1, 2}) benchmark->Args({rows, threads});
  }
  for (const int64_t rows : {64, 512, 1024}) benchmark->Args({rows, 1});
  benchmark->UseRealTime()->MinTime(0.1);
}

void RegisterFromMemory() {
  constexpr std::pair<const char*, WeightFormat> kFormats[] = {
      {"float32", WeightFormat::kFloat32},
      {"bfloat16", WeightFormat::kBfloat16},
      {"int8", WeightFormat::kInt8},
      {"int4", WeightFormat::kInt4}};
  for (const Shape& shape : kShapes) {
    const std::string suffix = std::string("/") + shape.name;
    for (const auto& [name, format] : kFormats) {
      FromMemory(benchmark::RegisterBenchmark(
          ("Packed/" + std::string(name) + suffix).c_str(),
          [shape, format = format](benchmark::State& state) { Packed(state, shape, format); }));
    }
    FromMemory(benchmark::RegisterBenchmark(
        ("RoundedInputs" + suffix).c_str(), [shape](benchmark::State& state) {
          Packed(state, shape, WeightFormat::kBfloat16, /*rounds=*/true);
        }));
    FromMemory(benchmark::RegisterBenchmark(
        ("OneDnnBfloat16" + suffix).c_str(),
        [shape](benchmark::State& state) { OneDnnBfloat16(state, shape); }));
    FromMemory(benchmark::RegisterBenchmark(
        ("Dense" + suffix).c_str(), [shape](benchmark::State& state) { Dense(state, shape); }));
    FromMemory(benchmark::RegisterBenchmark(
        ("Mkl" + suffix).c_str(), [shape](benchmark::State& state) { Mkl(state, shape); }));
  }
}

}  // namespace

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  RegisterFromMemory();
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
