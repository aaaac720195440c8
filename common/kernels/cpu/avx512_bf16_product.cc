#include "common/kernels/cpu/vector_product_impl.h"

namespace tandem::kernels {

void Avx512Bfloat16Product(const ProductArgs<uint16_t>& args);

namespace {
struct Pairs {
  static __m512 MultiplyAdd(__m512i a, __m512i b, __m512 sum) {
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
  }
};
}  // namespace

void Avx512Bfloat16Product(const ProductArgs<uint16_t>& args) {
  BlockedProduct<VectorKernel<uint16_t, Pairs>>(args);
}

}  // namespace tandem::kernels
