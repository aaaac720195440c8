#include "common/ops/matrix_product.h"

#include <ATen/ATen.h>
#include <ATen/OpMathType.h>
#include <ATen/core/grad_mode.h>
#include <ATen/native/CPUBlas.h>

#include <algorithm>

#include "common/kernels/cpu/product_kernels.h"
#include "common/ops/ops.h"
#include "common/ops/parallel_for.h"

// Of MKL, which libtorch holds on x86; a null pointer elsewhere. Sets how many threads MKL takes
// when this thread calls it, and returns the setting before.
extern "C" int MKL_Set_Num_Threads_Local(int threads) __attribute__((weak));
// Of MKL, too: product = alpha a b + beta product, with bf16 factors and a float32 product.
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

// How a product [m, n] is cut into equal pieces, down and across.
struct Pieces {
  int64_t down = 1, across = 1;
};

// Halves the longer side until no piece has more than 2^18 entries, nor more than a quarter of the
// product's (of a product that is worth it): large pieces are what MKL is fast at, and their number
// is a power of two, which threads share evenly.
Pieces CutIntoPieces(int64_t m, int64_t n) {
  constexpr int64_t kMostEntries = 1 << 18, kWorthCutting = 1 << 12;
  const int64_t most = std::min(kMostEntries, std::max(kWorthCutting, m * n / 4));
  Pieces pieces;
  while (m * n > most * pieces.down * pieces.across) {
    (m * pieces.across >= n * pieces.down ? pieces.down : pieces.across) *= 2;
  }
  return pieces;
}

void AtenProduct(at::Tensor product, const at::Tensor& a, const at::Tensor& b, bool accumulate) {
  if (accumulate) {
    product.addmm_(a, b);
  } else {
    at::mm_out(product, a, b);
  }
}

// What multiplies fastest is told by what the CPU has, not by a timing: two starts on one machine
// give the same bits.

// MKL has kernels for Intel's widest registers; on other CPUs it stays with those of AVX2.
bool IsMklAtItsBest() {
#ifdef __x86_64__
  static const bool intel = __builtin_cpu_is("intel");
  return intel;
#else
  return false;
#endif
}

// The own kernels where they are the fastest, else nullptr. Of few rows or columns, packing the
// other factor takes longer than MKL's product.

kernels::FloatProduct OwnFloatProduct(int64_t m, int64_t n) {
  constexpr int64_t kFewest = 8;
  if (IsMklAtItsBest() || std::min(m, n) < kFewest || GetKernelPath() != KernelPath::kAuto) {
    return nullptr;
  }
  return kernels::FindFloatProduct("avx512");
}

kernels::Bfloat16Product OwnBfloat16Product(int64_t m, int64_t n, int64_t k) {
  constexpr int64_t kFewest = 32;
  if (GetKernelPath() != KernelPath::kAuto) return nullptr;
  if (IsMklAtItsBest() && std::min({m, n, k}) < kFewest) return nullptr;
  const kernels::Bfloat16Product amx = kernels::FindBfloat16Product("amx");
  if (amx != nullptr || IsMklAtItsBest()) return amx;
  return kernels::FindBfloat16Product("avx512_bf16");
}

// Whether MKL multiplies bf16 faster than fp32.
bool HasFastMklBfloat16Products() {
  static const bool fast = cblas_gemm_bf16bf16f32 != nullptr && IsMklAtItsBest() &&
                           at::native::cpublas::could_pack(at::kBFloat16);
  return fast;
}

// A factor as BLAS takes it: rows of `stride` elements, or columns.
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
void OwnProduct(void (*multiply)(const kernels::ProductArgs<Number>&), const at::Tensor& product,
                const at::Tensor& a, const at::Tensor& b, bool accumulate) {
  const BlasFactor left(a), right(b);
  multiply({.a = static_cast<const Number*>(left.matrix.const_data_ptr()),
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
  constexpr int kRowMajor = 101, kPlain = 111, kTransposed = 112;  // of the CBLAS
  const BlasFactor left(a), right(b);
  cblas_gemm_bf16bf16f32(
      kRowMajor, left.transposed ? kTransposed : kPlain, right.transposed ? kTransposed : kPlain,
      static_cast<int>(a.size(0)), static_cast<int>(b.size(1)), static_cast<int>(a.size(1)), 1.0f,
      left.matrix.const_data_ptr(), static_cast<int>(left.stride), right.matrix.const_data_ptr(),
      static_cast<int>(right.stride), accumulate ? 1.0f : 0.0f, product.mutable_data_ptr<float>(),
      static_cast<int>(product.stride(0)));
}

// MKL may share the summed index out among its threads, so that the order of a sum depends on their
// number. Here it computes pieces that do not depend on it, each on one thread.
void MultiplyPieces(const at::Tensor& product, const at::Tensor& a, const at::Tensor& b,
                    bool accumulate) {
  const int64_t m = a.size(0), n = b.size(1), k = a.size(1);
  const Pieces pieces = CutIntoPieces(m, n);
  const int64_t count = pieces.down * pieces.across;
  ParallelFor(count, m * n * k / count, [&](int64_t begin, int64_t end) {
    for (int64_t piece = begin; piece < end; ++piece) {
      const int64_t i = piece / pieces.across, j = piece % pieces.across;
      const int64_t row = m * i / pieces.down, rows = m * (i + 1) / pieces.down - row;
      const int64_t column = n * j / pieces.across;
      const int64_t columns = n * (j + 1) / pieces.across - column;
      MatrixProductOnThread(product.narrow(0, row, rows).narrow(1, column, columns),
                            a.narrow(0, row, rows), b.narrow(1, column, columns), accumulate);
    }
  });
}

}  // namespace

void MatrixProductOnThread(const at::Tensor& product, const at::Tensor& a, const at::Tensor& b,
                           bool accumulate) {
  const at::NoGradGuard no_grad;
  if (product.scalar_type() != at::kFloat) return AtenProduct(product, a, b, accumulate);
  if (a.scalar_type() == at::kBFloat16 && b.scalar_type() == at::kBFloat16) {
    const auto own = OwnBfloat16Product(a.size(0), b.size(1), a.size(1));
    if (own != nullptr) return OwnProduct(own, product, a, b, accumulate);
    if (HasFastMklBfloat16Products()) {
      const SingleThreadedMkl single;
      return MklBfloat16Product(product, a, b, accumulate);
    }
  }
  const at::Tensor left = a.to(at::kFloat), right = b.to(at::kFloat);
  const auto own = OwnFloatProduct(a.size(0), b.size(1));
  if (own != nullptr) return OwnProduct(own, product, left, right, accumulate);
  if (MKL_Set_Num_Threads_Local == nullptr) {
    const at::Tensor sum = Linear(left.contiguous(), right.t().contiguous());
    accumulate ? product.add_(sum) : product.copy_(sum);
    return;
  }
  const SingleThreadedMkl single;
  AtenProduct(product, left, right, accumulate);
}

void MatrixProductInto(const at::Tensor& product, const at::Tensor& a, const at::Tensor& b,
                       bool accumulate) {
  const at::NoGradGuard no_grad;
  if (product.is_cpu() && product.scalar_type() == at::kFloat) {
    const bool as_they_are = HasFastMklBfloat16Products() ||
                             OwnBfloat16Product(a.size(0), b.size(1), a.size(1)) != nullptr;
    if (as_they_are) return MultiplyPieces(product, a, b, accumulate);
    return MultiplyPieces(product, a.to(at::kFloat), b.to(at::kFloat), accumulate);
  }
  if (a.scalar_type() == product.scalar_type()) return AtenProduct(product, a, b, accumulate);
  const at::Tensor sum = at::mm(a, b, product.scalar_type());
  accumulate ? product.add_(sum) : product.copy_(sum);
}

at::Tensor MatrixProduct(const at::Tensor& a, const at::Tensor& b) {
  const at::TensorOptions options = a.options().dtype(at::toOpMathType(a.scalar_type()));
  at::Tensor product = at::empty({a.size(0), b.size(1)}, options.requires_grad(false));
  MatrixProductInto(product, a, b);
  return product;
}

}  // namespace tandem::ops
