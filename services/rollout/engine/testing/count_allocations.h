// Counts what this program allocates with `new`, and the memory of libtorch's tensors. It defines
// these functions, so one source file of a test includes it.
#ifndef TANDEM_SERVICES_ROLLOUT_ENGINE_TESTING_COUNT_ALLOCATIONS_H_
#define TANDEM_SERVICES_ROLLOUT_ENGINE_TESTING_COUNT_ALLOCATIONS_H_

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <new>

namespace tandem::rollout {

inline std::atomic<bool> counting_allocations = false;
inline std::atomic<int64_t> num_allocations = 0;

// Returns the number of allocations of `work()`, on all threads.
template <typename Work>
int64_t CountAllocations(const Work& work) {
  num_allocations = 0;
  counting_allocations = true;
  work();
  counting_allocations = false;
  return num_allocations;
}

}  // namespace tandem::rollout

// NOLINTBEGIN(misc-definitions-in-headers): see above.
// Not inlined: the compiler would find `free` after `new`.
[[gnu::noinline]] void* operator new(size_t size) {
  if (tandem::rollout::counting_allocations) ++tandem::rollout::num_allocations;
  if (void* const memory = std::malloc(size)) return memory;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, size_t) noexcept { std::free(memory); }

// c10's allocator for the CPU.
extern "C" int posix_memalign(void** memory, size_t alignment, size_t size) noexcept {
  if (tandem::rollout::counting_allocations) ++tandem::rollout::num_allocations;
  *memory = std::aligned_alloc(alignment, (size + alignment - 1) / alignment * alignment);
  return *memory == nullptr ? ENOMEM : 0;
}
// NOLINTEND(misc-definitions-in-headers)

#endif  // TANDEM_SERVICES_ROLLOUT_ENGINE_TESTING_COUNT_ALLOCATIONS_H_
