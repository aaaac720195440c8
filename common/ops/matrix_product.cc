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

// MKL may share the summed index out among its threads, so that the order of a sum depends on their
// number. Here it computes pieces that do not depend on it, each on one thread.
at::Tensor MklProduct(const at::Tensor& a, const at::Tensor& b) {
  const int64_t m = a.size(0), n = b.size(1), k = a.size(1);
  const Pieces pieces = CutIntoPieces(m, n);
  const int64_t count = pieces.down * pieces.across;
  at::Tensor product = at::empty({m, n}, a.options());
  ParallelFor(count, m * n * k / count, [&](int64_t begin, int64_t end) {
    const SingleThreadedMkl single;
    const at::AutoDispatchBelowADInplaceOrView no_autograd;  // a setting of this thread, too
    for (int64_t piece = begin; piece < end; ++piece) {
      const int64_t i = piece / pieces.across, j = piece % pieces.across;
      const int64_t row = m * i / pieces.down, rows = m * (i + 1) / pieces.down - row;
      const int64_t column = n * j / pieces.across;
      const int64_t columns = n * (j + 1) / pieces.across - column;
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
