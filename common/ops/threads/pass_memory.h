// Tensors of forward passes that infer, used again pass after pass.
#ifndef TANDEM_COMMON_OPS_THREADS_PASS_MEMORY_H_
#define TANDEM_COMMON_OPS_THREADS_PASS_MEMORY_H_

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <array>
#include <cstdint>
#include <vector>

namespace tandem::ops {

// Tensors of one model's passes. A pass makes hundreds of tensors and views that live for a few
// operations; where it has few tokens, libtorch's work to allocate them shows. A tensor of this
// object is handed out again as soon as nobody else holds it or a view of it, whatever its shape
// was. Once passes of a size have run, further ones of that size allocate nothing.
//
// For one thread at a time. Results may outlive the object.
class PassMemory {
 public:
  // Most bytes of tensors that are kept. Passes whose tensors are larger allocate those, and then
  // nothing is kept beside them: memory is used again where an allocation is a cost, and a long
  // prefill takes no more than it needs.
  static constexpr int64_t kMaxBytes = 16 << 20;

  // Returns an uninitialised contiguous tensor on the CPU, of at most five dimensions.
  at::Tensor Empty(at::IntArrayRef sizes, at::ScalarType type);

  // Returns x.as_strided(sizes, strides, offset) for an `x` of any origin.
  at::Tensor View(const at::Tensor& x, at::IntArrayRef sizes, at::IntArrayRef strides,
                  int64_t offset);

  // Bytes of the tensors that are kept, in use or not.
  int64_t kept_bytes() const { return kept_bytes_; }

 private:
  struct Slot {
    at::Tensor tensor;
    std::vector<at::Tensor> views;
    int64_t bytes = 0;

    bool idle() const;
  };

  void DropIdle();

  std::vector<Slot> slots_;
  int64_t kept_bytes_ = 0;
};

// While it lives, the functions below take tensors of this thread from `memory`. Within
// c10::InferenceMode alone, so that no graph of autograd holds or sees such a tensor.
class PassMemoryScope {
 public:
  explicit PassMemoryScope(PassMemory& memory);
  PassMemoryScope(const PassMemoryScope&) = delete;
  PassMemoryScope& operator=(const PassMemoryScope&) = delete;
  ~PassMemoryScope();

 private:
  PassMemory* const outer_;
};

// Returns an uninitialised contiguous tensor on the CPU: of the scope, or a new one without one.
at::Tensor EmptyOnCpu(at::IntArrayRef sizes, at::ScalarType type = at::kFloat);

// Returns x.narrow(dim, start, length), which must be within `x`.
at::Tensor Narrow(const at::Tensor& x, int64_t dim, int64_t start, int64_t length);

// Returns x [T, sum of widths] as tensors [T, widths[i]] side by side.
std::array<at::Tensor, 3> SplitColumns(const at::Tensor& x, const std::array<int64_t, 3>& widths);

// Returns x [T, heads * D] as [T, heads, D].
at::Tensor SplitHeads(const at::Tensor& x, int64_t head_dim);

}  // namespace tandem::ops

#endif  // TANDEM_COMMON_OPS_THREADS_PASS_MEMORY_H_
