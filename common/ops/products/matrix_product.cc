#include "common/ops/products/matrix_product.h"

#include <ATen/ATen.h>
#include <ATen/OpMathType.h>
#include <ATen/core/grad_mode.h>
#include <ATen/native/CPUBlas.h>

#include <algorithm>
#include <vector>

#include "common/kernels/cpu/cpu_kernels.h"
#include "common/ops/ops.h"
#include "common/ops/threads/parallel_for.h"

// Two functions of MKL, which libtorch contains on x86; null pointers elsewhere.
// Sets the number of threads that MKL uses when this thread calls it, and returns the old setting.
extern "C" int MKL_Set_Num_Threads_Local(int threads) __attribute__((weak));
// product = alpha a b + beta product, with bf16 factors and a float32 product.
extern "C" void cblas_gemm_bf16bf16f32(int layout, int transpose_a, int transpose_b, int m, int n,
                                       int k, float alpha, const void* a, int a_stride,
                                       const void* b, int b_stride, float beta, float* product,
                                       int product_stride) __attribute__((weak));

namespace tandem::ops {
namespace {

class SingleThreadedMkl {
 public:
  SingleThreadedMkl() : before_(MKL_Set_Num_Threads_Local(1)) {}
  ~SingleThreadedMkl() { MKL_Set_Num_Threads_Local(before_); }
  SingleThreadedMkl(const SingleThreadedMkl&) = delete;
  SingleThreadedMkl& operator=(const SingleThreadedMkl&) = delete;

 private:
  const int before_;
};

// How many equal tiles a product [m, n] is divided into, down and across.
struct TileCounts {
  int64_t down = 1, across = 1;
};

// Halves the longer side until no tile has more than 2^18 entries, nor (of a product with enough
// entries for several threads) more than a quarter of the product's: MKL is fastest at large tiles,
// and a power of two of them is divided evenly among threads.
TileCounts CountTiles(int64_t m, int64_t n) {
  constexpr int64_t kMaxEntries = 1 << 18, kMinEntries = 1 << 12;
  const int64_t limit = std::min(kMaxEntries, std::max(kMinEntries, m * n / 4));
  TileCounts tiles;
  while (m * n > limit * tiles.down * tiles.across) {
    (m * tiles.across >= n * tiles.down ? tiles.down : tiles.across) *= 2;
  }
  return tiles;
}

void AtenProduct(at::Tensor product, const at::Tensor& a, const at::Tensor& b, bool accumulate) {
  if (accumulate) {
    product.addmm_(a, b);
  } else {
    at::mm_out(product, a, b);
  }
}

// A factor in a layout that BLAS takes: contiguous rows or columns, `stride` elements apart.
struct BlasFactor {
  explicit BlasFactor(const at::Tensor& x)
      : matrix(x.stride(1) == 1 || x.stride(0) == 1 ? x : x.contiguous()),
        transposed(matrix.stride(1) != 1),
        stride(std::max<int64_t>(matrix.stride(transposed ? 1 : 0),
                                 matrix.size(transposed ? 0 : 1))) {}
  at::Tensor matrix;
  bool transposed;
  int64_t stride;
};

template <typename Number>
void OwnProduct(const kernels::ProductKernel<Number>& kernel, const at::Tensor& product,
                const at::Tensor& a, const at::Tensor& b, bool accumulate) {
  const BlasFactor left(a), right(b);
  kernel.multiply({.a = static_cast<const Number*>(left.matrix.const_data_ptr()),
                   .a_row_stride = left.matrix.stride(0),
                   .a_column_stride = left.matrix.stride(1),
                   .b = static_cast<const Number*>(right.matrix.const_data_ptr()),
                   .b_row_stride = right.matrix.stride(0),
                   .b_column_stride = right.matrix.stride(1),
                   .product = product.mutable_data_ptr<float>(),
                   .product_stride = product.stride(0),
                   .m = a.size(0),
                   .n = b.size(1),
                   .k = a.size(1),
                   .accumulate = accumulate});
}

void MklBfloat16Product(const at::Tensor& product, const at::Tensor& a, const at::Tensor& b,
                        bool accumulate) {
  constexpr int kRowMajor = 101, kPlain = 111, kTransposed = 112;  // constants of CBLAS
  const BlasFactor left(a), right(b);
  cblas_gemm_bf16bf16f32(
      kRowMajor, left.transposed ? kTransposed : kPlain, right.transposed ? kTransposed : kPlain,
      static_cast<int>(a.size(0)), static_cast<int>(b.size(1)), static_cast<int>(a.size(1)), 1.0f,
      left.matrix.const_data_ptr(), static_cast<int>(left.stride), right.matrix.const_data_ptr(),
      static_cast<int>(right.stride), accumulate ? 1.0f : 0.0f, product.mutable_data_ptr<float>(),
      static_cast<int>(product.stride(0)));
}

void LinearProduct(const at::Tensor& product, const at::Tensor& a, const at::Tensor& b,
                   bool accumulate) {
  const at::Tensor sum = Linear(a.contiguous(), b.t().contiguous());
  accumulate ? product.add_(sum) : product.copy_(sum);
}

// The ways to multiply into a float32 product on one thread of the CPU.
enum class Multiplier {
  kOwn,          // the product kernel of common/kernels for the type of the factors
  kMklBfloat16,  // bf16 factors
  kMkl,          // float32 factors
  kLinear,       // float32 factors, where libtorch has no MKL
};

struct Method {
  Multiplier multiplier;
  at::ScalarType factors;  // type that both factors are converted to
};

// Whether MKL multiplies bf16 faster than float32.
bool HasFastMklBfloat16() {
  static const bool fast = cblas_gemm_bf16bf16f32 != nullptr &&
                           kernels::DetectCpuFeatures().intel &&
                           at::native::cpublas::could_pack(at::kBFloat16);
  return fast;
}

// Chooses the fastest method for a b. docs/internals/kernels.md has the choice as a table.
Method ChooseMethod(const at::Tensor& a, const at::Tensor& b) {
  const kernels::CpuKernels& cpu = kernels::GetCpuKernels();
  const int64_t size = std::min({a.size(0), a.size(1), b.size(1)});
  const auto is_own = [&](const auto& kernel) {
    return kernel.multiply != nullptr && size >= kernel.min_size;
  };
  if (a.scalar_type() == at::kBFloat16 && b.scalar_type() == at::kBFloat16) {
    if (is_own(cpu.bfloat16_product)) return {Multiplier::kOwn, at::kBFloat16};
    if (HasFastMklBfloat16()) return {Multiplier::kMklBfloat16, at::kBFloat16};
  }
  if (is_own(cpu.float_product)) return {Multiplier::kOwn, at::kFloat};
  return {MKL_Set_Num_Threads_Local != nullptr ? Multiplier::kMkl : Multiplier::kLinear,
          at::kFloat};
}

// Multiplies on the calling thread alone. The factors have the method's type.
void Multiply(const Method& method, const at::Tensor& product, const at::Tensor& a,
              const at::Tensor& b, bool accumulate) {
  const kernels::CpuKernels& cpu = kernels::GetCpuKernels();
  switch (method.multiplier) {
    case Multiplier::kOwn:
      return method.factors == at::kBFloat16
                 ? OwnProduct(cpu.bfloat16_product, product, a, b, accumulate)
                 : OwnProduct(cpu.float_product, product, a, b, accumulate);
    case Multiplier::kMklBfloat16: {
      const SingleThreadedMkl single;
      return MklBfloat16Product(product, a, b, accumulate);
    }
    case Multiplier::kMkl: {
      const SingleThreadedMkl single;
      return AtenProduct(product, a, b, accumulate);
    }
    case Multiplier::kLinear:
      return LinearProduct(product, a, b, accumulate);
  }
}

// A product and its tiles. The factors have the method's type.
struct TiledProduct {
  TiledProduct(const at::Tensor& into, const at::Tensor& left, const at::Tensor& right, bool adds)
      : accumulate(adds),
        method(ChooseMethod(left, right)),
        tiles(CountTiles(left.size(0), right.size(1))),
        product(into),
        a(left.to(method.factors)),
        b(right.to(method.factors)) {}

  int64_t count() const { return tiles.down * tiles.across; }
  int64_t work() const { return a.size(0) * b.size(1) * a.size(1); }

  bool accumulate;
  Method method;
  TileCounts tiles;
  at::Tensor product, a, b;
};

void MultiplyTile(const TiledProduct& whole, int64_t tile) {
  const TileCounts& tiles = whole.tiles;
  const int64_t m = whole.a.size(0), n = whole.b.size(1);
  const int64_t i = tile / tiles.across, j = tile % tiles.across;
  const int64_t row = m * i / tiles.down, rows = m * (i + 1) / tiles.down - row;
  const int64_t column = n * j / tiles.across;
  const int64_t columns = n * (j + 1) / tiles.across - column;
  Multiply(whole.method, whole.product.narrow(0, row, rows).narrow(1, column, columns),
           whole.a.narrow(0, row, rows), whole.b.narrow(1, column, columns), whole.accumulate);
}

// MKL may divide the summed index among its threads, so that the order of a sum depends on their
// number. The tiles do not depend on it, and each is computed on one thread.
void MultiplyTiles(const std::vector<TiledProduct>& products) {
  struct Tile {
    const TiledProduct* whole;
    int64_t index;
  };
  std::vector<Tile> tiles;
  int64_t work = 0;
  for (const TiledProduct& product : products) {
    work += product.work();
    for (int64_t i = 0; i < product.count(); ++i) tiles.push_back({&product, i});
  }
  const auto count = static_cast<int64_t>(tiles.size());
  const int64_t grain =
      std::max<int64_t>(1, kWorkPerThread / (work / std::max<int64_t>(1, count) + 1));
  at::parallel_for(0, count, grain, [&](int64_t begin, int64_t end) {
    const at::NoGradGuard no_grad;  // a setting of this thread
    for (int64_t i = begin; i < end; ++i) MultiplyTile(*tiles[i].whole, tiles[i].index);
  });
}

}  // namespace

void MatrixProductOnThread(const at::Tensor& product, const at::Tensor& a, const at::Tensor& b,
                           bool accumulate) {
  const at::NoGradGuard no_grad;
  if (product.scalar_type() != at::kFloat) return AtenProduct(product, a, b, accumulate);
  const Method method = ChooseMethod(a, b);
  Multiply(method, product, a.to(method.factors), b.to(method.factors), accumulate);
}

void MatrixProductInto(const at::Tensor& product, const at::Tensor& a, const at::Tensor& b,
                       bool accumulate) {
  const at::NoGradGuard no_grad;
  if (product.is_cpu() && product.scalar_type() == at::kFloat) {
    return MultiplyTiles({TiledProduct(product, a, b, accumulate)});
  }
  if (a.scalar_type() == product.scalar_type()) return AtenProduct(product, a, b, accumulate);
  // cuBLAS writes bf16 factors' product as float32, or adds it to what is there: no temporary.
  at::Tensor result = product;
  if (accumulate) {
    at::addmm_out(result, result, a, b, result.scalar_type());
  } else {
    at::mm_out(result, a, b, result.scalar_type());
  }
}

void MatrixProducts(const std::vector<Product>& products) {
  const at::NoGradGuard no_grad;
  std::vector<TiledProduct> tiled;
  for (const auto& [product, a, b, accumulate] : products) {
    if (product.numel() > 0) tiled.emplace_back(product, a, b, accumulate);
  }
  MultiplyTiles(tiled);
}

at::Tensor MatrixProduct(const at::Tensor& a, const at::Tensor& b) {
  const at::TensorOptions options = a.options().dtype(at::toOpMathType(a.scalar_type()));
  at::Tensor product = at::empty({a.size(0), b.size(1)}, options.requires_grad(false));
  MatrixProductInto(product, a, b);
  return product;
}

}  // namespace tandem::ops
