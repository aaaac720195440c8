#include "common/kernels/cpu/vector_product_impl.h"

namespace tandem::kernels {
namespace {

struct Bfloat16Pairs {
  static __m512 MultiplyAdd(__m512i a, __m512i b, __m512 sum) {
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
  }
};

}  // namespace

void Avx512Bfloat16Product(const ProductArgs<uint16_t>& args) {
  Multiply<VectorMicroKernel<uint16_t, Bfloat16Pairs>>(args);
}

}  // namespace tandem::kernels
