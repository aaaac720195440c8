#include "common/ops/matrix_product.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>

#include "common/ops/ops.h"
#include "common/ops/parallel_for.h"

// Of MKL, which libtorch holds on x86; a null pointer elsewhere. Sets how many threads MKL takes
// when this thread calls it, and returns the setting before.
extern "C" int MKL_Set_Num_Threads_Local(int threads) __attribute__((weak));

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

// MKL may share the summed index out among its threads, so that the order of a sum depends on their
// number. Here it computes pieces whose size does not depend on it, each on one thread.
at::Tensor MklProduct(const at::Tensor& a, const at::Tensor& b) {
  constexpr int64_t kRows = 256, kColumns = 96;
  const int64_t m = a.size(0), n = b.size(1), k = a.size(1);
  const int64_t across = (n + kColumns - 1) / kColumns, pieces = across * ((m + kRows - 1) / kRows);
  at::Tensor product = at::empty({m, n}, a.options());
  ParallelFor(pieces, kRows * kColumns * k, [&](int64_t begin, int64_t end) {
    const SingleThreadedMkl single;
    const at::AutoDispatchBelowADInplaceOrView no_autograd;  // a setting of this thread, too
    for (int64_t piece = begin; piece < end; ++piece) {
      const int64_t row = piece / across * kRows, column = piece % across * kColumns;
      const int64_t rows = std::min(kRows, m - row), columns = std::min(kColumns, n - column);
      at::Tensor part = product.narrow(0, row, rows).narrow(1, column, columns);
      at::mm_out(part, a.narrow(0, row, rows), b.narrow(1, column, columns));
    }
  });
  return product;
}

}  // namespace

at::Tensor MatrixProduct(const at::Tensor& a, const at::Tensor& b) {
  const at::NoGradGuard no_grad;
  if (!a.is_cpu() || a.scalar_type() != at::kFloat) return at::mm(a, b);
  // A property of the build, not a timing: two starts on one machine give the same bits.
  return MKL_Set_Num_Threads_Local != nullptr ? MklProduct(a, b)
                                              : Linear(a.contiguous(), b.t().contiguous());
}

}  // namespace tandem::ops
