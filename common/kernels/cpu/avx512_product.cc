#include "common/kernels/cpu/vector_product_impl.h"

namespace tandem::kernels {
namespace {

struct Floats {
  static __m512 MultiplyAdd(__m512i a, __m512i b, __m512 sum) {
    return _mm512_fmadd_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), sum);
  }
};

}  // namespace

void Avx512Product(const ProductArgs<float>& args) {
  Multiply<VectorMicroKernel<float, Floats>>(args);
}

}  // namespace tandem::kernels
